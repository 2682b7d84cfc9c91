"""The settings of a demo run."""

from __future__ import annotations

from enum import StrEnum

import msgspec

FEWEST_EPOCHS = 10
ENOUGH_EPOCHS = 60
"""After this many epochs, the model is better than a bigram model (after 40 it is just better), and a newcomer has had
time to start and take part, even on a slow machine."""


class GradientCodec(StrEnum):
    """The codec of the averaged gradients."""

    NONE = "none"
    FLOAT16 = "float16"


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's choices for one ``shoal demo``. Raises ``ValueError`` for choices that cannot be run."""

    out: str
    peers: int = 4
    epochs: int = 150
    kill: bool = True
    compression: GradientCodec = GradientCodec.NONE
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        if self.peers < 1 or (self.kill and self.peers < 2):
            raise ValueError(f"--peers {self.peers} leaves nobody to train; use 2 or more, or 1 with --no-kill")
        if self.epochs < FEWEST_EPOCHS:
            raise ValueError(f"--epochs {self.epochs} leaves no time for a newcomer; use {FEWEST_EPOCHS} or more")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} is negative; use 0 or more")
