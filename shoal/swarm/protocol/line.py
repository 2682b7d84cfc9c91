"""The line of states that led to a peer's state. With it, a peer can tell an ancestor from another side of a fork."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.swarm.protocol.tip import DIGEST_BYTES, Tip

MAX_LINE = 1024  # lineages that a peer remembers
MAX_OFFERED = 256  # lineages that it sends to a newcomer


class Line:
    """The lineages of the states that led to one peer's state, the present one last. One thread changes the line;
    others may read it.

    Attributes:
        lineages: the last MAX_LINE lineages.
    """

    def __init__(self) -> None:
        self.lineages: tuple[bytes, ...] = ()

    def __contains__(self, lineage: bytes) -> bool:
        return lineage in self.lineages

    def divides_from(self, tip: Tip, mine: Tip) -> bool:
        """Whether another peer's state `tip` is on another side of a fork that this peer's side outranks: `mine`, to
        which this line leads, outranks it and does not follow from it. Returns False if the line no longer reaches back
        as far as `tip`."""
        is_remembered = tip.epoch > mine.epoch - len(self.lineages)
        return tip.epoch > 0 and mine.outranks(tip) and is_remembered and tip.lineage not in self

    def went_to(self, tip: Tip) -> None:
        """The peer has moved to that state, which follows from the one before."""
        if tip.lineage not in self.lineages[-1:]:
            self.lineages = (*self.lineages, tip.lineage)[-MAX_LINE:]

    def take_over(self, line: Sequence[bytes], tip: Tip) -> None:
        """The peer has taken over another peer's state, `tip`. `line` leads to it, as far as that is known."""
        before = next((at for at, lineage in enumerate(line) if lineage in self.lineages), None)
        known: tuple[bytes, ...] = ()
        if before is not None:
            known = self.lineages[: self.lineages.index(line[before])]
        self.lineages = (*known, *(line if before is None else line[before:]))[-MAX_LINE:]
        self.went_to(tip)

    def to_wire(self) -> bytes:
        """The last MAX_OFFERED lineages, concatenated."""
        return b"".join(self.lineages[-MAX_OFFERED:])


def line_to(tip: Tip, wire: bytes) -> tuple[bytes, ...]:
    """The line that leads to `tip`, from the bytes that a peer sent (`Line.to_wire`). That peer may be past `tip` by
    now. Empty if its line does not contain `tip`."""
    lineages = split(wire)
    return lineages[: lineages.index(tip.lineage) + 1] if tip.lineage in lineages else ()


def leaves(mine: Tip, tip: Tip, line: Collection[bytes]) -> bool:
    """Whether a peer at `mine` loses samples if it moves to `tip`, to which `line` leads: `tip` does not follow from
    `mine`."""
    return mine.epoch > 0 and not tip.is_state_of(mine) and mine.lineage not in line


def split(wire: bytes) -> tuple[bytes, ...]:
    """The lineages that `Line.to_wire` has concatenated. An incomplete one at the end is ignored."""
    whole = len(wire) - len(wire) % DIGEST_BYTES
    return tuple(wire[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES))


def agreed(lines: Collection[Sequence[bytes]]) -> tuple[bytes, ...]:
    """The line on which all holders of a state agree, cut to the shortest of their lines; empty if they disagree.

    So a single liar can make a peer see a fork where there is none, which only makes it keep one state too many. To
    hide a fork, all holders of the state must lie."""
    shortest = min(lines, key=len, default=())
    alike = all(tuple(line[len(line) - len(shortest) :]) == tuple(shortest) for line in lines)
    return tuple(shortest) if alike else ()
