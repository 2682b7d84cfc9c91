"""Peers of several processes, each in a framework, for the tests of this folder."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.forked import ForkedProcess
from tests.integrations.training import Told


class Ranks:
    """The processes of one peer.

    Args:
        folder: for what they write.
        ranks: how many.
        launcher: start them with `torchrun`; else as it would: its agent imports torch once more, and each rank, too.
        options: of all, see rank.py.
    """

    def __init__(self, folder: Path, ranks: int, *, launcher: bool = False, **options: Any) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(parents=True, exist_ok=True)
        given = json.dumps({"target": 32, "batch": 4, "folder": str(folder), "ranks": ranks, **options})
        run = ["tests.integrations.rank", given]
        self._launched = launcher
        self._store: TCPStore | None = None
        if launcher:
            how = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), "-m"]
            self.processes = [ForkedProcess("torch.distributed.run", *how, *run, log=folder / "log 0")]
            return
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True)  # which torchrun's agent has
        told = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        }  # fmt: skip
        self.processes = [
            ForkedProcess(
                *run,
                log=folder / f"log {rank}",
                environment={**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {},
            )
            for rank in range(ranks)
        ]

    def wait(self, timeout: float = 90.0) -> list[int]:
        """How the processes have ended."""
        until = time.monotonic() + timeout
        return [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]

    def told(self) -> list[Told]:
        """What each rank has told."""
        found = []
        for rank in range(self.ranks):
            said = self.folder / f"said {rank}"
            lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
            done: dict[str, Any] = next((line for line in lines if line["kind"] == "done"), {})
            found.append(Told([line for line in lines if line["kind"] != "done"], done))
        return found

    def log(self, rank: int = 0) -> str:
        """What it has printed; where a launcher has started them, all of them."""
        return (self.folder / f"log {rank}").read_text()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if self._launched:  # it ends its ranks
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20.0)
                except subprocess.TimeoutExpired:
                    process.kill()
            else:
                process.kill()
        for process in self.processes:
            process.wait(20.0)
        self._store = None  # which listens
