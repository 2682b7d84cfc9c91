"""Run checks on real ranks: python -m tests.sharding.zero_ranks RANK RANKS FOLDER MODULE[:CHECK]…"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from tests.forked import ROOT, ForkedProcess

DIED = "the process ended with"
"""How the failure of a rank begins that could not say anything."""


class Ranks:
    """One process per rank, which run all checks of some modules one after the other.

    Args:
        ranks: how many.
        folder: an empty one.
        modules: with checks; or single checks, as MODULE:CHECK.
    """

    def __init__(self, ranks: int, folder: Path, modules: list[str]) -> None:
        self._folder = folder
        self._processes = [
            ForkedProcess(
                "tests.sharding.zero_ranks",
                *(str(rank), str(ranks), str(folder), *modules),
                environment={"GLOO_SOCKET_IFNAME": "lo"},
                log=folder / f"{rank}.log",
            )
            for rank in range(ranks)
        ]

    def failures(self, check: str) -> list[str | None]:
        """Waits for one check: by rank None where it passed, else why not."""
        return [self._failure(check, rank, process) for rank, process in enumerate(self._processes)]

    def _failure(self, check: str, rank: int, process: ForkedProcess) -> str | None:
        path = self._folder / f"{check}.{rank}.json"
        while True:
            ended = process.poll() is not None  # asked first: what it wrote at the end counts
            if path.exists():
                failure: str | None = json.loads(path.read_text())
                return failure
            if ended:
                return f"{DIED} {process.poll()}:\n{(self._folder / f'{rank}.log').read_text()}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def checks_of(module: str) -> list[str]:
    """The names of a module's checks, in their order."""
    lines = (ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines()
    return [line.removeprefix("def ").split("(")[0] for line in lines if line.startswith("def check_")]


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for name in sys.argv[4:]:
        name, _, only = name.partition(":")
        module = importlib.import_module(name)
        for check in [only] if only else checks_of(name):
            # A group of its own for each, so that what fails leaves the next alone.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{check}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=100),
            )
            # All are connected then: a rank that is done, and leaves, may else be gone before another has found it.
            dist.barrier()
            failure = None
            try:
                getattr(module, check)()
            except Exception:  # noqa: BLE001 (told to the test, which shows it)
                failure = traceback.format_exc()
            written = folder / f"{check}.{rank}"
            written.write_text(json.dumps(failure))
            written.rename(f"{written}.json")
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
