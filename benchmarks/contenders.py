"""Who takes part in `benchmarks.averaging`, what was measured of each, and what is compared, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.report import Figure, median, paired
from benchmarks.swarm import Memory, Round

Busy = Literal["", "one", "all"]
LARGE = 25_000_000  # elements from which on the promises for large vectors hold


@dataclass(frozen=True)
class Contender:
    """One row of the table: which peers average, and which of their trainers run pure Python meanwhile."""

    name: str
    side: str  # sealed, codec, shoal, before or hivemind
    arguments: tuple[str, ...] = ()  # of its workers, after all others
    busy: Busy = ""

    @property
    def swarm(self) -> tuple[str, ...]:
        """Names the peers that it runs on: busy or not, they are the same."""
        return (self.side, *self.arguments)


SEALED = Contender("sealed sockets", "sealed")
CODEC = Contender("the codec alone", "codec")
SHOAL = Contender("Shoal", "shoal")
BEFORE = Contender("Shoal before", "before")
KNOWN = Contender("hivemind, size known", "hivemind", ("known",))
UNKNOWN = Contender("hivemind, size not known", "hivemind", ("unknown",))
IDLE = (SEALED, CODEC, SHOAL, BEFORE, KNOWN, UNKNOWN)


def while_busy(contender: Contender, busy: Busy) -> Contender:
    """The same peers while trainers are busy."""
    return Contender(f"{contender.name}, {busy} busy", contender.side, contender.arguments, busy)


def contenders(sides: Sequence[str], codec: str, busy: Busy) -> list[Contender]:
    """Whoever takes part with that codec."""
    loaded = [while_busy(contender, busy) for contender in (SEALED, SHOAL, BEFORE, KNOWN)]
    taking_part = [contender for contender in (*IDLE, *loaded) if contender.side in sides]
    return [contender for contender in taking_part if contender.side != "codec" or codec != "none"]


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

    def each(self, field: str) -> list[float | None]:
        """A field of every round; None of those that failed."""
        return [None if a_round.failure else getattr(a_round, field) for a_round in self.rounds]


def comparisons(codec: str, elements: int, busy: Busy) -> list[tuple[Contender, Contender, str, str]]:
    """What is compared: above the line, below it, the field of Round, and what the project promises of it."""
    sealed, shoal, before, known = (while_busy(who, busy) for who in (SEALED, SHOAL, BEFORE, KNOWN))
    return [
        (SHOAL, SEALED, "seconds", "<= 1.6" if codec == "none" and elements >= LARGE else ""),
        (shoal, sealed, "seconds", "<= 1.6" if codec == "none" and elements >= LARGE and busy == "all" else ""),
        (SHOAL, SEALED, "cpu_seconds", ""),
        (BEFORE, SHOAL, "seconds", "" if codec != "none" else ">= 1.9" if elements >= LARGE else ">= 1.5"),
        (before, shoal, "seconds", ""),
        (SHOAL, BEFORE, "cpu_seconds", "<= 0.5" if codec == "none" else ""),
        (KNOWN, SHOAL, "allreduce", ">= 3"),
        (UNKNOWN, SHOAL, "seconds", ">= 4"),
        (KNOWN, SHOAL, "seconds", ""),
        (KNOWN, SHOAL, "cpu_seconds", ""),
        (shoal, SHOAL, "seconds", "<= 1.5" if busy == "one" else ""),
        (sealed, SEALED, "seconds", ""),
        (known, KNOWN, "seconds", ""),
    ]


FIELDS = {"seconds": "round", "allreduce": "all-reduce", "cpu_seconds": "CPU"}


def compare(codec: str, elements: int, busy: Busy, results: Sequence[Result]) -> list[Figure]:
    """The comparisons for one codec, as far as both sides were measured."""
    figures = []
    measured = {result.contender: result for result in results if result.codec == codec}
    for above, below, field, bound in comparisons(codec, elements, busy):
        if above in measured and below in measured:
            ratio = paired(measured[above].each(field), measured[below].each(field))
            if ratio is not None:
                figures.append(Figure(f"{codec}: {FIELDS[field]}, {above.name} / {below.name}", ratio, bound))
    if {SHOAL, SEALED, CODEC} <= measured.keys():
        both = zip(measured[SEALED].each("seconds"), measured[CODEC].each("seconds"), strict=True)
        ratio = paired(measured[SHOAL].each("seconds"), [a + b if a and b else None for a, b in both])
        if ratio is not None:
            name = f"{codec}: round, Shoal / (sealed sockets with its bytes + the codec alone)"
            figures.append(Figure(name, ratio, "<= 1.15"))
    joins = measured[SHOAL].median("join_to_begin") if SHOAL in measured else None
    if joins is not None:
        figures.append(Figure(f"{codec}: last JOIN to BEGIN, Shoal, in ms", 1000 * joins, "<= 50"))
    return figures
