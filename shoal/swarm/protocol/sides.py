"""Finds the states of other members that are on another side of a fork of the run."""

from __future__ import annotations

from shoal.swarm.protocol.line import Line
from shoal.swarm.protocol.tip import Tip

MAX_SIDES = 1024  # states that are remembered


class Sides:
    """Finds the states of other sides that this peer's state outranks, each once.

    A member may tell its state before this peer is at a state that outranks it. So told states are kept until that is
    decided. (If this peer's state never outranks it, this peer moves to the other state, and reports that.)
    """

    def __init__(self) -> None:
        self._undecided: dict[bytes, tuple[bytes, Tip]] = {}  # by lineage: the last member that told it, and the tip
        self._told: dict[bytes, None] = {}  # lineages

    def hear(self, key: bytes, tip: Tip) -> None:
        """A member is at that state."""
        if tip.epoch and tip.lineage not in self._told:
            self._undecided[tip.lineage] = key, tip
            if len(self._undecided) > MAX_SIDES:
                del self._undecided[next(iter(self._undecided))]

    def remember(self, lineage: bytes) -> None:
        """Do not report that state any more."""
        self._undecided.pop(lineage, None)
        self._told[lineage] = None
        if len(self._told) > MAX_SIDES:
            del self._told[next(iter(self._told))]

    def find(self, line: Line, mine: Tip) -> list[tuple[bytes, Tip]]:
        """The told states on other sides of a fork than `line`, which leads to `mine`, each with its member."""
        found = []
        for lineage, (key, tip) in list(self._undecided.items()):
            if line.divides_from(tip, mine):
                self.remember(lineage)
                found.append((key, tip))
            elif mine.outranks(tip) or lineage in line:
                del self._undecided[lineage]
        return found
