"""Who takes part in `benchmarks.averaging`, what was measured of each, and which medians are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Figure, median
from benchmarks.swarm import Memory, Round


@dataclass(frozen=True)
class Contender:
    """One row of the table: which peers average, and whether one of their trainers runs pure Python meanwhile."""

    name: str
    side: str  # floor, shoal or hivemind
    arguments: tuple[str, ...] = ()  # of its workers, after the codec
    busy: bool = False

    @property
    def swarm(self) -> tuple[str, ...]:
        """Names the peers that it runs on: busy or not, they are the same."""
        return (self.side, *self.arguments)


FLOOR = Contender("floor", "floor")
FLOOR_BUSY = Contender("floor, busy", "floor", busy=True)
SHOAL = Contender("Shoal", "shoal")
SHOAL_BUSY = Contender("Shoal, busy", "shoal", busy=True)
KNOWN = Contender("hivemind, size known", "hivemind", ("known",))
KNOWN_BUSY = Contender("hivemind, size known, busy", "hivemind", ("known",), busy=True)
UNKNOWN = Contender("hivemind, size not known", "hivemind", ("unknown",))
CONTENDERS = (FLOOR, SHOAL, KNOWN, UNKNOWN, FLOOR_BUSY, SHOAL_BUSY, KNOWN_BUSY)


@dataclass(frozen=True)
class Result:
    """All that was measured of one contender with one codec."""

    codec: str
    contender: Contender
    rounds: list[Round]
    memory: Memory
    idle_cpu: float  # CPU seconds per second of all its peers between rounds
    error: float  # largest of an element, against the exact mean

    @property
    def good_rounds(self) -> list[Round]:
        """The rounds that did not fail."""
        return [a_round for a_round in self.rounds if a_round.failure is None]

    def median(self, field: str) -> float | None:
        """The median of a field of the good rounds."""
        return median(getattr(a_round, field) for a_round in self.good_rounds)


COMPARISONS = (  # what is compared, above the line, below it, the field of Round, and what the project promises
    ("all-reduce, hivemind / Shoal", KNOWN, SHOAL, "allreduce", ">= 3"),
    ("whole round, hivemind (size not known) / Shoal", UNKNOWN, SHOAL, "seconds", ">= 4"),
    ("whole round, hivemind (size known) / Shoal", KNOWN, SHOAL, "seconds", ""),
    ("CPU, hivemind (size known) / Shoal", KNOWN, SHOAL, "cpu_seconds", ""),
    ("round, Shoal busy / Shoal", SHOAL_BUSY, SHOAL, "seconds", "<= 1.5"),
    ("round, floor busy / floor", FLOOR_BUSY, FLOOR, "seconds", ""),
    ("round, hivemind busy / hivemind (size known)", KNOWN_BUSY, KNOWN, "seconds", ""),
    ("all-reduce, Shoal / floor", SHOAL, FLOOR, "allreduce", ""),
    ("CPU, Shoal / floor", SHOAL, FLOOR, "cpu_seconds", ""),
)


def compare(codec: str, results: Sequence[Result]) -> list[Figure]:
    """The comparisons for one codec, as far as both sides were measured."""
    figures = []
    measured = {result.contender: result for result in results if result.codec == codec}
    for name, above, below, field, bound in COMPARISONS:
        if above in measured and below in measured:
            top, bottom = measured[above].median(field), measured[below].median(field)
            if top is not None and bottom is not None:
                figures.append(Figure(f"{codec}: {name}", top / bottom, bound))
    joins = measured[SHOAL].median("join_to_begin") if SHOAL in measured else None
    if joins is not None:
        figures.append(Figure(f"{codec}: last JOIN to BEGIN, Shoal, in ms", 1000 * joins, "<= 50"))
    return figures
