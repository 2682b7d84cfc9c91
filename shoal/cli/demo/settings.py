"""The settings of a demo run: the user's choices, and the configuration of one peer process."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from shoal.cli.demo.text import Text, file_text, standard_library_text

FEWEST_EPOCHS = 10
ENOUGH_EPOCHS = 60
"""After this many epochs, the model is better than a bigram model (after 40 it is just better), and a newcomer has had
time to start and take part, even on a slow machine."""


class Compression(StrEnum):
    """The codec of the averaged gradients."""

    NONE = "none"
    FLOAT16 = "float16"


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's choices for one ``shoal demo``. Raises ``ValueError`` for choices that cannot be run."""

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
        """Whether the run may end before the model beats the bigram model, and before the newcomer has joined."""
        return self.epochs < ENOUGH_EPOCHS

    @property
    def kill_epoch(self) -> int:
        """One peer is killed when this epoch is committed."""
        return self.epochs * 2 // 5

    @property
    def join_epoch(self) -> int:
        """A new peer is started when this epoch is committed."""
        return self.epochs * 3 // 5


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a peer process, which is on its command line as JSON. A peer with ``evaluates`` also
    measures the held-out loss."""

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
