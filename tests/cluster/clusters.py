"""Clusters of one run, each of some ranks, which are processes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.peers import Worker
from tests.workers.cluster import ClusterRank, Options

Rank = Worker[ClusterRank]

SAMPLES = 4  # of one rank in a step


class Clusters:
    """The clusters of one test, which find each other through the first.

    Args:
        folder: for what they write.
        ranks: of all clusters together: each brings its samples once in an epoch, and with `waits` no more than that.
        run: options of all, see Options.
    """

    def __init__(self, folder: Path, ranks: int, **run: Any) -> None:
        self.folder, self._run = folder, {"target": SAMPLES * ranks, **run}
        self.all: list[list[Rank]] = []
        self.folders: list[Path] = []

    def add(
        self, kind: str, size: int, first: int, environment: dict[str, str] | None = None, **options: Any
    ) -> list[Rank]:
        """Start one; `first`: whose part of the samples its rank 0 has; `environment`: variables that its ranks have
        beside those of this process."""
        folder = self.folder / f"cluster {len(self.all)}"
        folder.mkdir(parents=True)
        told = Options(**{**self._run, "kind": kind, "size": size, "first": first, **options})
        initial_peers = self.all[0][0].addresses if self.all else []
        ranks = [Worker(ClusterRank, environment, folder / f"log {rank}") for rank in range(size)]
        self.all.append(ranks)
        self.folders.append(folder)
        for number, rank in enumerate(ranks):
            rank.begin(ClusterRank, initial_peers, number, str(folder / "store"), told)
        for rank in ranks:
            rank.started()
        for rank in ranks:
            rank.tell(ClusterRank.train)
            rank.process.stdin.close()
        return ranks

    def said(self, cluster: int, rank: int) -> list[dict[str, Any]]:
        """What that rank has said so far."""
        return self.all[cluster][rank].said

    def log(self, cluster: int, rank: int) -> str:
        """What it has logged, and said."""
        said = "\n".join(map(json.dumps, self.said(cluster, rank)))
        return (self.folders[cluster] / f"log {rank}").read_text() + said

    def digests(self, cluster: int, rank: int) -> dict[int, str]:
        """After each epoch."""
        return {said["epoch"]: said["digest"] for said in self.said(cluster, rank) if "epoch" in said}

    def longest_wait(self, cluster: int) -> tuple[float, str]:
        """The most seconds between two epochs of that cluster, and what all ranks have said around that time."""
        ended = {said["epoch"]: said["time"] for said in self.said(cluster, 0) if "epoch" in said}
        seconds, since = max((after - before, before) for before, after in itertools.pairwise(ended.values()))
        around = [
            f"cluster {number}, rank {rank}: {json.dumps(said)}"
            for number, ranks in enumerate(self.all)
            for rank in range(len(ranks))
            for said in self.said(number, rank)
            if since - 2.0 < said.get("time", 0.0) < since + seconds + 1.0
        ]
        return seconds, "\n".join(around)

    def wait(self, condition: Any, timeout: float = 90.0) -> None:
        """Poll until it is so: the processes do not report by themselves."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def ended(self) -> list[list[int]]:
        """How all ranks have ended, once they have."""
        self.wait(lambda: all(rank.process.poll() is not None for ranks in self.all for rank in ranks))
        return [[rank.wait(1.0) for rank in ranks] for ranks in self.all]

    def logs(self) -> str:
        return "\n".join(
            f"cluster {number}, rank {rank}: {self.log(number, rank)[-2000:]}"
            for number, ranks in enumerate(self.all)
            for rank in range(len(ranks))
        )


@contextmanager
def clusters(folder: Path, ranks: int, **run: Any) -> Iterator[Clusters]:
    """Within, they run."""
    made = Clusters(folder, ranks, **run)
    try:
        yield made
    finally:
        for rank in itertools.chain(*made.all):
            rank.end()
