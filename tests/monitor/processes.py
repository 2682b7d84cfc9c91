"""Trainers as processes of their own, as the tests of this folder start them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.peers import PeerProcess


class Trainers:
    """The peers of one test, which find each other through the first.

    Args:
        options: of all, see trainer.py.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.all: list[PeerProcess] = []

    def add(self, **differing: Any) -> PeerProcess:
        """Start one more, and wait until it is in the run."""
        peers = {"initial_peers": self.addresses} if self.addresses else {}
        trainer = PeerProcess("tests.monitor.trainer", self._options | peers | differing)
        self.all.append(trainer)
        trainer.started()
        return trainer

    @property
    def addresses(self) -> list[str]:
        return next((trainer.addresses for trainer in self.all if trainer.addresses), [])

    def train(self) -> None:
        for trainer in self.all:
            trainer.ask(do="train")

    def pause(self) -> None:
        for trainer in self.all:
            trainer.ask(do="pause")


@contextmanager
def trainers(count: int, **options: Any) -> Iterator[Trainers]:
    """So many peers in a run, which do not train yet."""
    made = Trainers(options)
    try:
        for _ in range(count):
            made.add()
        yield made
    finally:
        for trainer in made.all:
            trainer.end()
