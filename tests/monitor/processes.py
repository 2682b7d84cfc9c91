"""Trainers as processes of their own, as the tests of this folder start them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.peers import Worker, ask_all
from tests.workers.monitored import Monitored

Peer = Worker[Monitored]


class Trainers:
    """The peers of one test, which find each other through the first.

    Args:
        options: of all, see Monitored.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.all: list[Peer] = []

    def add(self, **differing: Any) -> Peer:
        """Start one more, and wait until it is in the run."""
        trainer = Worker(Monitored)
        self.all.append(trainer)
        trainer.begin(Monitored, self.addresses, **(self._options | differing))
        trainer.started()
        return trainer

    @property
    def addresses(self) -> list[str]:
        return next((trainer.addresses for trainer in self.all if trainer.addresses), [])

    def train(self) -> None:
        ask_all(self.all, Monitored.train)

    def pause(self) -> None:
        ask_all(self.all, Monitored.pause)


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
