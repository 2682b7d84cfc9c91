"""What came of an optimizer in a world."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """The outcomes, with what stands in the table."""

    EQUAL = "="
    CLOSE = "1e-6"
    WORD = "a word"  # it works, and Shoal says what is different
    REFUSED = "refused"  # by Shoal's own words, before a parameter has changed
    NONE = "-"  # it does not work without Shoal either
    WRONG = "WRONG"  # other numbers in silence, a crash, a flood of log lines, a hang


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        kind: in one word.
        why: in a sentence; "" if there is nothing to say.
        seconds: how long it took.
    """

    kind: Kind
    why: str = ""
    seconds: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.name}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Outcome:
        return cls(Kind[wire["kind"]], wire["why"], wire["seconds"])
