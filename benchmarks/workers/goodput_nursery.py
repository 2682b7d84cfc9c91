"""Forks replicas of `benchmarks.goodput` from a process that has imported a system whole. Argument: the system."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.places import Place, enter
from benchmarks.workers.link import answer


def main() -> None:
    """Answers each command `fork` with the pid of a replica, and when it was forked."""
    worker = importlib.import_module(f"benchmarks.workers.goodput_{sys.argv[1]}")
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])  # torch's first optimizer imports many modules
    gc.freeze()  # else each replica copies what it shares with this process as soon as it looks at it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so nobody needs to wait for the dead

    def fork(command: str, place: list[str], log: str, given: dict[str, Any]) -> tuple[int, float]:
        assert command == "fork"
        forked = time.time()
        pid = os.fork()
        if not pid:
            live(worker.run, Place(*place), log, given | {"forked": forked})
        return pid, forked

    answer(fork, lambda: None)


def live(run: Any, place: Place, log: str, given: dict[str, Any]) -> None:
    """What the forked process does: it never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(0)
        enter(place)
        run(given)
    except BaseException:  # noqa: BLE001 - nothing of the process that was forked may run on here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
