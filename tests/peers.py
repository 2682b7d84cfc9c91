"""Peers as processes of their own: workers that obey JSON lines on stdin and answer with JSON lines on stdout."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
from typing import Any

from tests.forked import ROOT as ROOT
from tests.forked import ForkedProcess


class PeerProcess:
    """A worker process.

    Args:
        module: that is run; it says one line with `addresses` and `peer` when it is ready.
        options: its argument, as JSON.
    """

    def __init__(self, module: str, options: dict[str, Any]) -> None:
        self.process = ForkedProcess(module, json.dumps(options), talk=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.addresses: list[str] = []
        self.peer = ""

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def hear(self, timeout: float = 150.0) -> dict[str, Any] | None:
        """The next answer; None if the process has ended. Raises queue.Empty if there is none in time."""
        line = self._answers.get(timeout=timeout)
        return json.loads(line) if line else None

    def started(self) -> None:
        """Wait until it is ready."""
        answer = self.hear()
        assert answer is not None, f"the worker ended before it was ready: {self.process.wait(10.0)}"
        self.addresses, self.peer = answer["addresses"], answer["peer"]

    def tell(self, **command: Any) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, *, timeout: float = 150.0, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        answer = self.hear(timeout)
        assert answer is not None, f"the worker ended instead of answering: {self.process.wait(10.0)}"
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """SIGSTOP: its connections stay, and nothing in it runs."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Leave nothing behind, whatever it is doing."""
        self.kill()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it was told something when it was gone
                pipe.close()
