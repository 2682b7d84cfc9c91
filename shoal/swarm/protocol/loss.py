"""The loss that a closure has returned, as peers tell it: JOIN carries that of a peer, and BEGIN the run's."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated

import msgspec

MOST = 1e300


class LossKind(IntEnum):
    """The type of the loss, in the order of how large it may be: the run's loss has the largest kind among its
    members'."""

    FLOAT16 = 0
    BFLOAT16 = 1
    FLOAT32 = 2
    FLOAT64 = 3
    NUMBER = 4
    """A number of Python, and no tensor."""


LARGEST = {
    LossKind.FLOAT16: 65504.0,
    LossKind.BFLOAT16: float.fromhex("0x1.fep127"),
    LossKind.FLOAT32: float.fromhex("0x1.fffffep127"),
    LossKind.FLOAT64: MOST,
    LossKind.NUMBER: MOST,
}
"""The largest loss of each kind: beyond it, the kind (or a mean) would be infinite."""


class Loss(msgspec.Struct, array_like=True, frozen=True):
    """A finite loss.

    Raises:
        ValueError: if its kind can't hold it.
    """

    value: Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]
    kind: LossKind

    def __post_init__(self) -> None:
        if not abs(self.value) <= LARGEST[self.kind]:
            raise ValueError(f"a loss of {self.value}, which a {self.kind.name.lower()} can't hold")


def mean_of(given: Iterable[tuple[Loss | None, float]]) -> Loss | None:
    """The mean of (loss, weight) pairs; None if there is none, or if one with a weight over 0 has no loss. The mean of
    equal losses is that loss, to the bit."""
    pairs = [(loss, weight) for loss, weight in given if weight > 0]
    losses = [loss for loss, _ in pairs if loss is not None]
    if not losses or len(losses) < len(pairs):
        return None
    values, total = [loss.value for loss in losses], sum(weight for _, weight in pairs)
    moved = sum(weight / total * (value - values[0]) for (_, weight), value in zip(pairs, values, strict=True))
    mean = min(max(values[0] + moved, min(values)), max(values))  # rounding never leads out of their range
    kinds = {loss.kind for loss in losses}
    # A class that reads a tensor can't read a number, so one peer's number makes no number of the others' tensors.
    return Loss(mean, LossKind.FLOAT64 if LossKind.NUMBER in kinds and len(kinds) > 1 else max(kinds))
