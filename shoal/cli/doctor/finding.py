"""What the doctor has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Level(enum.Enum):
    """How bad a finding is."""

    WELL = "well"
    MIND = "mind"  # training works, but slower, or for fewer others than it could
    STOPS = "stops"  # this machine cannot take part


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of what was looked at.
        level: how bad it is.
        found: what is there, in words.
        advice: the way out; "" where none is needed.
        facts: the same for programs, with units in the names.
    """

    name: str
    level: Level
    found: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name,
            "level": self.level.value,
            "found": self.found,
            "advice": self.advice,
            "facts": self.facts,
        }
