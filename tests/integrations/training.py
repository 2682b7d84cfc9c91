"""Trainings of one or two processes, each in a framework, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.optim.processes import by_epoch as by_epoch
from tests.peers import PeerProcess


@dataclass
class Told:
    """What a peer has told: its reports of epochs and downloads, and what it has trained."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> list[int]:
        return [event["epoch"] for event in self.events if event["kind"] == "epoch"]

    @property
    def downloads(self) -> int:
        return sum(event["kind"] == "download" for event in self.events)

    @property
    def late_downloads(self) -> int:
        """Those that came after an epoch that it had ended itself. A newcomer may need two before: on a busy machine
        the first takes longer than an epoch."""
        kinds = [event["kind"] for event in self.events]
        return kinds[kinds.index("epoch") :].count("download") if "epoch" in kinds else 0

    @property
    def epochs_together(self) -> int:
        """How many epochs it has ended in rounds of two."""
        return sum(event["kind"] == "epoch" and event["peers"] == 2 for event in self.events)


TOGETHER = {"min_peers": 2}
"""Of the run: no peer ends an epoch, and so the training, before the other is there."""


class Training:
    """Processes that train one run, which find each other through the first.

    Args:
        options: of all, see worker.py.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"target": 32, "batch": 4, **options}
        self.processes: list[PeerProcess] = []
        self.told: list[Told] = []

    def add(self, *differing: dict[str, Any]) -> None:
        """Start a peer for each, and have all of them train."""
        new = [PeerProcess("tests.integrations.worker", self._options | own) for own in differing]
        self.processes += new
        self.told += [Told() for _ in new]
        for process in new:
            process.started()
        for process in new:
            process.tell(initial_peers=next((other.addresses for other in self.processes if other.addresses), []))
            process.started()

    def hear(self, index: int) -> bool:
        """Wait for the next thing that it tells; whether it goes on."""
        message = self.processes[index].hear()
        assert message is not None, f"peer {index} ended: {self.processes[index].process.wait(10.0)}"
        if message["kind"] == "done":
            self.told[index].done = message
            return False
        self.told[index].events.append(message)
        return True

    def hear_epoch(self, index: int, epoch: int) -> None:
        """Wait until it has come to an epoch."""
        while not self.told[index].events or self.told[index].events[-1]["epoch"] < epoch:
            assert self.hear(index), "it has ended before"

    def finish(self, *indices: int) -> list[Told]:
        """Wait until these have ended, or all."""
        for index in indices or range(len(self.processes)):
            while self.hear(index):
                pass
        return self.told


@contextmanager
def training(*peers: dict[str, Any], **options: Any) -> Iterator[Training]:
    """A training of so many peers, which have begun."""
    one = Training(**options)
    try:
        one.add(*peers)
        yield one
    finally:
        for process in one.processes:
            process.end()
