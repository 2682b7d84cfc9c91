"""Which of the states that others are at are of another side, where the run has forked."""

from __future__ import annotations

from shoal.swarm.protocol.line import Line
from shoal.swarm.protocol.tip import Tip

MAX_SIDES = 1024  # states that are remembered


class Sides:
    """Finds the states of other sides that this peer's state outranks, each once.

    What a member says of its state may come before this peer is at the one that outranks it: it is kept until that is
    decided. (If it is never outranked, this peer leaves its own state, and says so.)
    """

    def __init__(self) -> None:
        self._undecided: dict[bytes, tuple[bytes, Tip]] = {}  # by lineage: who was last heard at it
        self._told: dict[bytes, None] = {}  # lineages

    def hear(self, key: bytes, tip: Tip) -> None:
        """A member is at that state."""
        if tip.epoch and tip.lineage not in self._told:
            self._undecided[tip.lineage] = key, tip
            if len(self._undecided) > MAX_SIDES:
                del self._undecided[next(iter(self._undecided))]

    def remember(self, lineage: bytes) -> None:
        """Find nothing of that state any more."""
        self._undecided.pop(lineage, None)
        self._told[lineage] = None
        if len(self._told) > MAX_SIDES:
            del self._told[next(iter(self._told))]

    def find(self, line: Line, mine: Tip) -> list[tuple[bytes, Tip]]:
        """The members, and their states, that were heard of and divide from the line that leads to `mine`."""
        found = []
        for lineage, (key, tip) in list(self._undecided.items()):
            if line.divides_from(tip, mine):
                self.remember(lineage)
                found.append((key, tip))
            elif mine.outranks(tip) or lineage in line:
                del self._undecided[lineage]
        return found
