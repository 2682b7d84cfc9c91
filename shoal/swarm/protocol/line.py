"""The line of states behind the one that a peer holds: so that it can tell an ancestor from a fork."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.swarm.protocol.tip import DIGEST_BYTES, Tip

MAX_LINE = 1024  # lineages that a peer remembers
MAX_OFFERED = 256  # of these that it tells a newcomer


class Line:
    """The lineages that the states of one peer went through, the present one last. One thread changes it, others may
    read it.

    Attributes:
        lineages: the last MAX_LINE.
    """

    def __init__(self) -> None:
        self.lineages: tuple[bytes, ...] = ()

    def __contains__(self, lineage: bytes) -> bool:
        return lineage in self.lineages

    def divides_from(self, tip: Tip, mine: Tip) -> bool:
        """Whether another peer's state, `tip`, is one that this line, which leads to `mine`, has left aside: `mine`
        outranks it, and does not follow from it. An ancestor that is forgotten is none."""
        is_remembered = tip.epoch > mine.epoch - len(self.lineages)
        return tip.epoch > 0 and mine.outranks(tip) and is_remembered and tip.lineage not in self

    def went_to(self, tip: Tip) -> None:
        """The peer is at that state now, which follows from the one before."""
        if tip.lineage not in self.lineages[-1:]:
            self.lineages = (*self.lineages, tip.lineage)[-MAX_LINE:]

    def take_over(self, line: Sequence[bytes], tip: Tip) -> None:
        """The peer has another's state now, with the line that leads to it, as far as that is known."""
        before = next((at for at, lineage in enumerate(line) if lineage in self.lineages), None)
        known: tuple[bytes, ...] = ()
        if before is not None:
            known = self.lineages[: self.lineages.index(line[before])]
        self.lineages = (*known, *(line if before is None else line[before:]))[-MAX_LINE:]
        self.went_to(tip)

    def to_wire(self) -> bytes:
        """The last MAX_OFFERED lineages, one after another."""
        return b"".join(self.lineages[-MAX_OFFERED:])


def line_to(tip: Tip, wire: bytes) -> tuple[bytes, ...]:
    """The line that leads to `tip`, out of what a peer told (`Line.to_wire`), which may have gone on since; nothing if
    it does not lead there."""
    lineages = split(wire)
    return lineages[: lineages.index(tip.lineage) + 1] if tip.lineage in lineages else ()


def leaves(mine: Tip, tip: Tip, line: Collection[bytes]) -> bool:
    """Whether a peer at `mine` that goes to `tip`, to which that line leads, leaves samples that are not behind it."""
    return mine.epoch > 0 and not tip.is_state_of(mine) and mine.lineage not in line


def split(wire: bytes) -> tuple[bytes, ...]:
    """The lineages that `Line.to_wire` has put one after another; what is left over at the end does not count."""
    whole = len(wire) - len(wire) % DIGEST_BYTES
    return tuple(wire[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES))


def agreed(lines: Collection[Sequence[bytes]]) -> tuple[bytes, ...]:
    """The line on which all who hold a state agree: as long as the shortest. A lone liar can so make a fork of what is
    none, which keeps one state too many; to make none of what is one, all who hold the state must lie."""
    shortest = min(lines, key=len, default=())
    alike = all(tuple(line[len(line) - len(shortest) :]) == tuple(shortest) for line in lines)
    return tuple(shortest) if alike else ()
