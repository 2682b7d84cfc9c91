"""The name of a state: how many rounds were committed, which ones, and how many samples are behind them."""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec
from blake3 import blake3

DIGEST_BYTES = 32
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # of one member in one round
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]  # more than all weights of a run can add up to


class Tip(msgspec.Struct, frozen=True, array_like=True):
    """A state of a run. Two states that may differ never have the same tip: see `after`.

    Attributes:
        epoch: rounds committed so far.
        lineage: hash of the parent's lineage and of what the last round committed, 32 bytes.
        samples: the sum of the weights of all rounds behind this state.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    lineage: Digest
    samples: Amount

    def __post_init__(self) -> None:
        if not math.isfinite(self.samples):
            raise ValueError(f"a state with {self.samples} samples behind it")

    @classmethod
    def genesis(cls, run_id: str) -> Tip:
        """Where every peer of the run begins."""
        return cls(0, blake3(b"shoal genesis\0" + run_id.encode()).digest(), 0.0)

    def after(self, root: bytes, samples: float) -> Tip:
        """The tip after a round that committed what `root` names, with the summed weight `samples`."""
        lineage = blake3(b"shoal lineage\0" + self.lineage + root).digest()
        return Tip(self.epoch + 1, lineage, self.samples + samples)

    def outranks(self, other: Tip) -> bool:
        """Whether a swarm that holds both states keeps this one: more samples, more epochs, then the larger hash."""
        return (self.samples, self.epoch, self.lineage) > (other.samples, other.epoch, other.lineage)

    def round_id(self, ballot: Ballot) -> bytes:
        """16 bytes that name the round that `ballot` begins at this tip."""
        text = struct.pack(">QQ", self.epoch, ballot.number) + self.lineage + ballot.coordinator
        return blake3(b"shoal round\0" + text).digest(length=16)


class Ballot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Fences coordinators: of two that act for one tip, members follow the higher ballot, and forget the lower.

    Attributes:
        number: the attempt; higher than every one that the coordinator has heard of.
        coordinator: the peer (key) that holds this ballot, so that no two peers hold the same.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    coordinator: Digest


NO_BALLOT = Ballot(0, bytes(DIGEST_BYTES))  # lower than all that coordinators hold
