"""Runs each case, an optimizer in a world, in a process that is forked for it: so none can stop, spoil or hang
another."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.zoo.classes import Entry
from tests.zoo.outcome import Kind, Outcome
from tests.zoo.worlds import (
    WORLDS,
    Given,
    Told,
    compared,
    differ,
    is_random,
    listening,
    must_work,
    of_error,
    read_from,
    written,
    zero,
)

SECONDS = 75.0
"""The limit of a case; more than any needs, those that compile included."""
_FORK = get_context("fork")


def run(cases: Sequence[tuple[Entry, str]], jobs: int) -> Iterator[tuple[Entry, str, Outcome]]:
    """Run cases, `jobs` at a time, and yield each with its outcome when it has ended."""
    waiting = list(reversed(cases))
    running: list[_Case] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Case(*waiting.pop()))
            wait([case.answer for case in running], timeout=0.5)
            for case in list(running):
                outcome = case.outcome()
                if outcome is not None:
                    running.remove(case)
                    yield case.entry, case.world, outcome
    finally:
        for case in running:
            case.end()


class _Case:
    """One case, in a process of its own, which leads a group of processes."""

    def __init__(self, entry: Entry, world: str) -> None:
        self.entry, self.world, self._began = entry, world, time.monotonic()
        self.answer, theirs = _FORK.Pipe(duplex=False)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (until `end`)
        self._process = _FORK.Process(target=_in_case, args=(entry, world, theirs, self._log.fileno()))
        self._process.start()
        theirs.close()

    def outcome(self) -> Outcome | None:
        """What came of it; None while it runs."""
        took = time.monotonic() - self._began
        if self.answer.poll():
            try:
                found = Outcome.from_wire(json.loads(self.answer.recv()))
            except EOFError:
                self._process.join(5.0)
                found = Outcome(Kind.WRONG, f"crash: the process ended with {self._process.exitcode}; {self._said()}")
        elif took > SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, signal.SIGUSR1)  # where every thread is, into its log
            time.sleep(0.5)
            found = Outcome(Kind.WRONG, f"hang: {SECONDS:g} s; {self._said()}")
        else:
            return None
        self.end()
        return replace(found, seconds=round(took, 1))

    def _said(self) -> str:
        """What it has written: where its main thread was, if it has written that, else the end."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        _, mark, frames = text.rpartition("(most recent call first):")
        return frames[:600] if mark else text[-600:]

    def end(self) -> None:
        """End it, with the processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self.answer.close()
        self._log.close()


def _in_case(entry: Entry, world: str, answer: Connection, log: int) -> None:
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    shorten_the_wait()
    with listening() as told:
        try:
            outcome = _zero(entry) if world == "zero" else WORLDS[world](entry, told)
        except Given as given:
            outcome = Outcome(given.kind, given.why)
        except Exception as error:  # noqa: BLE001
            outcome = of_error(error, moved=False)
        if told.flood and outcome.kind is not Kind.WRONG:
            outcome = Outcome(Kind.WRONG, f"flood of {told.flood}")
        with contextlib.suppress(Exception):
            if outcome.kind in (Kind.WRONG, Kind.WORD) and is_random(entry):
                outcome = replace(outcome, why=f"it draws random numbers; {outcome.why}")
                if world == "zero" and "differs" in outcome.why:  # each rank draws its own: the guide has the word
                    outcome = replace(outcome, kind=Kind.WORD)
    answer.send(json.dumps(outcome.to_wire()))
    os._exit(0)  # whatever threads of other people's packages are still there


def shorten_the_wait() -> None:
    """A run's first round waits a second for peers that nobody has found yet. Here all are known."""
    import shoal.swarm.protocol.peer as protocol

    protocol.SETTLE_SECONDS = 0.0  # type: ignore[misc]


# -- ZeRO, on two ranks


def _zero(entry: Entry) -> Outcome:
    wanted = must_work(entry)
    if entry.of_model or entry.named:
        return Outcome(Kind.NONE, "it is made of a model, or of names")
    ends: list[tuple[Any, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            answer, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_in_rank, args=(entry, rank, str(Path(folder, "store")), theirs))
            process.start()
            theirs.close()
            ends.append((answer, process))
        answers = [_received(answer, process) for answer, process in ends]
    for error in (one for one in answers if isinstance(one, Outcome) and one.kind is not Kind.EQUAL):
        return error
    (whole, resumed, said), (other, _, _) = ((*read_from(saved)[0], said) for saved, said in answers)
    told = Told()
    told.lines = [(logging.WARNING, line, line) for line in said]
    if differ(whole, other):
        return Outcome(Kind.WRONG, "the ranks differ")
    outcome = compared(whole, wanted, told)
    again = compared(resumed, whole, told)
    return outcome if outcome.kind is not Kind.EQUAL else replace(again, why=f"resumed: {again.why}" * bool(again.why))


def _received(answer: Connection, process: Any) -> Any:
    try:
        return answer.recv()
    except EOFError:
        process.join()
        return Outcome(Kind.WRONG, f"crash: a rank ended with {process.exitcode}")


def _in_rank(entry: Entry, rank: int, store: str, answer: Connection) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    with listening() as told:
        try:
            result: Any = (written(zero(entry, rank)), told.warnings)
        except Exception as error:  # noqa: BLE001
            result = of_error(error, moved=False)
            if result.kind is Kind.WRONG and told.warnings:
                result = Outcome(Kind.WORD, f"{told.warnings[0]} ({result.why})")
    answer.send(result)
    answer.close()
    os._exit(0)


ALL_WORLDS = (*WORLDS, "zero")
