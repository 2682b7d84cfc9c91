"""Processes that begin with torch imported, which would take each of them 2 to 4 s of CPU: they are forked from a
server that has done that once for the run.

They are real processes: they have their own memory and sockets, are killed and stopped by signals, and share nothing
with the test that started them. What they have in common is the seed of their hashes; tests in which what is hashed
may not matter, and those of commands, start Python themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.swarm.protocol import peer as protocol_peer

ROOT = Path(__file__).parents[1]
SETTLE_SECONDS = protocol_peer.SETTLE_SECONDS  # as users have it: imported before conftest.py changes it

CONTEXT = multiprocessing.get_context("forkserver")
# The first also because an optimizer imports it in its first step. None of them starts a thread.
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.optim",
        "shoal",
        "shoal.sharding.grad_scaler",
        "shoal.sharding.overlap",
    ]
)


class ForkedProcess:
    """A process that runs a module, as `python -m MODULE ARGUMENTS` would.

    Args:
        module: what it runs, as its `__main__`.
        arguments: its `sys.argv[1:]`.
        environment: variables that it has beside those of the server, which started with this process's.
        log: a file for what it writes to stdout and stderr; else it writes where this process does.
        talk: give it `stdin` and `stdout`, as text; else it reads nothing.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        talk: bool = False,
    ) -> None:
        theirs: tuple[Connection, Connection] | None = None
        if talk:
            to_read, ours_to_write = CONTEXT.Pipe(duplex=False)
            ours_to_read, to_write = CONTEXT.Pipe(duplex=False)
            theirs = to_read, to_write
            self.stdin = os.fdopen(os.dup(ours_to_write.fileno()), "w")
            self.stdout = os.fdopen(os.dup(ours_to_read.fileno()))
            ours_to_write.close()
            ours_to_read.close()
        given = (module, arguments, environment or {}, log, theirs)
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()
        for end in theirs or ():
            end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """How it ended, a signal as its negative number; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and say how. Raises subprocess.TimeoutExpired if that takes more seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        # The server reaps it, so it may be gone although its end was not told here yet.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    log: Path | None,
    ends: tuple[Connection, Connection] | None,
) -> None:
    """In the new process."""
    protocol_peer.SETTLE_SECONDS = 0.0  # see conftest.py
    gc.freeze()  # what the server has imported: see conftest.py
    faulthandler.enable()
    os.chdir(ROOT)
    os.environ.update(environment)
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if ends is not None:
        for number, end in enumerate(ends):
            os.dup2(end.fileno(), number)
            end.close()
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 (to the very end)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
