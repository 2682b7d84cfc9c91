"""What a demo run is made of: the user's choices, and what one peer process is told of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from shoal.cli.demo.text import Text, file_text, standard_library_text

FEWEST_EPOCHS = 10
ENOUGH_EPOCHS = 60
"""With so many the model has learned more than a bigram model knows (with 40 it just has), and a newcomer has had the
time to start and take part, also on a slow machine."""


class Compression(StrEnum):
    """The codec of the averaged gradients."""

    NONE = "none"
    FLOAT16 = "float16"


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one ``shoal demo``. Raises ``ValueError`` for those that cannot be run."""

    out: Path
    peers: int = 4
    epochs: int = 150
    kill: bool = True
    compression: Compression = Compression.NONE
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.peers < 1 or (self.kill and self.peers < 2):
            raise ValueError(f"--peers {self.peers} leaves nobody to train; use 2 or more, or 1 with --no-kill")
        if self.epochs < FEWEST_EPOCHS:
            raise ValueError(f"--epochs {self.epochs} leaves no time for a newcomer; use {FEWEST_EPOCHS} or more")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} is negative; use 0 or more")

    @property
    def is_short(self) -> bool:
        """Whether the run may be over before the model beats the bigram model, and before a newcomer is there."""
        return self.epochs < ENOUGH_EPOCHS

    @property
    def kill_epoch(self) -> int:
        """When this epoch is committed, one peer is killed."""
        return self.epochs * 2 // 5

    @property
    def join_epoch(self) -> int:
        """When this epoch is committed, a new peer is started."""
        return self.epochs * 3 // 5


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer process is told on its command line, as JSON. ``evaluates``: it also measures the held-out loss."""

    index: int
    run_id: str
    initial_peers: list[str]
    epochs: int
    compression: Compression
    seed: int
    data: str | None
    evaluates: bool


def load_text(data: Path | None) -> Text:
    """The text of ``--data``, or the standard library's source. Raises :class:`~shoal.cli.demo.text.TextError`."""
    return standard_library_text() if data is None else file_text(data)
