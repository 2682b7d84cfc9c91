"""What a signal handler raises while calls on workers are under way is no error of a worker."""

from __future__ import annotations

import os
import signal

import pytest

from shoal.remote import calls


class Answer:
    """A call on a worker, during which Ctrl-C comes."""

    def wait(self) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return "answer"


def test_it_comes_out_after_all_workers_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def bell(number: int, frame: object) -> None:
        raise ValueError("rung")

    asked: list[str] = []

    def ask(name: str, *_: object, **__: object) -> Answer:
        asked.append(name)
        return Answer()

    monkeypatch.setattr("torch.distributed.rpc.rpc_async", ask)
    before = signal.signal(signal.SIGUSR1, bell)
    try:
        with pytest.raises(ValueError, match="rung"):
            calls.call_all("step", {"first": (len, ()), "second": (len, ())})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == ["first", "second"]
