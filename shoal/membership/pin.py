"""A pin: the owner's statement which state of the run to follow, before all other states."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from shoal.membership.signed import Key, Number, Statement, StatementKind


class Pin(Statement, frozen=True, array_like=True):
    """Follow this state and its descendants before all others. Only the pin with the highest number counts.

    Attributes:
        run_id: the run.
        number: the number of this pin. It is part of the tip of all peers that follow the pin.
        epoch, samples, lineage: the tip of the state.
        rewind: descendants that were made before the pin do not count, so peers that hold one go back.
    """

    number: Number
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    samples: Annotated[float, msgspec.Meta(ge=0, le=1e300)]
    lineage: Key
    rewind: bool

    def __post_init__(self) -> None:
        if not math.isfinite(self.samples):
            raise ValueError(f"a state with {self.samples} samples behind it")

    @property
    def tip(self) -> str:
        """The text form of the tip."""
        return tip_text(self.epoch, self.samples, self.lineage)

    @classmethod
    def of_text(cls, run_id: str, number: int, tip: str, *, rewind: bool = False) -> Pin:
        """The pin of the tip with that text form. Raises ValueError if it is no tip."""
        try:
            epoch, samples, lineage = tip.strip().split(":")
            pin = cls(run_id, number, int(epoch), float(samples), bytes.fromhex(lineage), rewind)
            if len(pin.lineage) != 32 or pin.epoch < 0 or pin.samples < 0:
                raise ValueError("a number is out of its bounds")
        except ValueError as error:
            raise ValueError(
                f"{tip!r} is not a tip: give <epoch>:<samples>:<64 hex digits>, as peers log it and "
                f"`optimizer.tip` shows it ({error})"
            ) from error
        return pin


def tip_text(epoch: int, samples: float, lineage: bytes) -> str:
    """The text form of a state's tip: `<epoch>:<samples>:<lineage, 64 hex digits>`."""
    return f"{epoch}:{samples:.17g}:{lineage.hex()}"


PIN = StatementKind("pin", Pin, max_bytes=320)
