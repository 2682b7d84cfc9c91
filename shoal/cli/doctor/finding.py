"""What the doctor says of one thing."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is."""

    GOOD = "good"
    POOR = "poor"  # it takes part, and something is slower or harder than it could be
    BAD = "bad"  # it can't take part


class Finding(msgspec.Struct, frozen=True):
    """What is so, and what to do about it ("" if nothing)."""

    about: str
    level: Level
    says: str
    way_out: str = ""
