"""The findings of the doctor."""

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
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        level: how bad it is.
        found: the result, in words.
        advice: what to do; "" if nothing needs to be done.
        facts: the result for programs, with units in the names.
    """

    name: str
    level: Level
    found: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding as plain data, for `--json`."""
        return {
            "name": self.name,
            "level": self.level.value,
            "found": self.found,
            "advice": self.advice,
            "facts": self.facts,
        }
