"""The name of a state: how many rounds were committed, which rounds, and how many samples they had."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from blake3 import blake3

from shoal.membership.pin import tip_text

DIGEST_BYTES = 32
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # of one member in one round
MOST_SAMPLES, LAST_EPOCH = 1e300, (1 << 53) - 1
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST_SAMPLES)]  # more than all weights of a run can add up to


class Tip(msgspec.Struct, frozen=True, array_like=True):
    """A state of a run. Two states that may differ never have the same tip: see `after`.

    Attributes:
        epoch: rounds committed so far.
        lineage: hash of the parent's lineage and of what the last round committed, 32 bytes.
        samples: the sum of the weights of all rounds behind this state.
        pin: the number of the owner's pin of this state, or of the last pinned state before it in its line; 0 without a
            pin, as in all open runs.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=LAST_EPOCH)]
    lineage: Digest
    samples: Amount
    pin: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.samples):
            raise ValueError(f"a state with {self.samples} samples behind it")

    @classmethod
    def genesis(cls, run_id: str) -> Tip:
        """The tip at which every peer of the run begins."""
        return cls(0, blake3(b"shoal genesis\0" + run_id.encode()).digest(), 0.0)

    def after(self, root: bytes, samples: float) -> Tip:
        """The tip after a round that committed `root`, with the summed weight `samples`."""
        lineage = blake3(b"shoal lineage\0" + self.lineage + root).digest()
        # Within the bounds of messages, even if a liar has claimed huge numbers for the state before.
        epoch, samples = min(self.epoch + 1, LAST_EPOCH), min(self.samples + samples, MOST_SAMPLES)
        return Tip(epoch, lineage, samples, self.pin)

    def rewritten(self, digest: bytes) -> Tip:
        """The tip of this state after its user has set parameters with the hash `digest`. It has the same epoch and
        samples. This tip outranks it, so that one peer alone does not move the run; without other peers it stays. Peers
        that set the same parameters get the same tip."""
        drawn, own = blake3(b"shoal rewritten\0" + self.lineage + digest).digest(), int.from_bytes(self.lineage)
        lineage = (int.from_bytes(drawn) % max(1, own)).to_bytes(len(self.lineage))
        return Tip(self.epoch, lineage, self.samples, self.pin)

    def outranks(self, other: Tip) -> bool:
        """Whether a swarm that holds both states keeps this one. These decide, in this order: the newer pin, more
        samples, more epochs, the larger hash."""
        mine, theirs = (self.samples, self.epoch, self.lineage), (other.samples, other.epoch, other.lineage)
        return (self.pin, *mine) > (other.pin, *theirs)

    def is_state_of(self, other: Tip) -> bool:
        """Whether both tips name the same state. Their pins may differ, if the owner has pinned the state since."""
        return (self.epoch, self.lineage) == (other.epoch, other.lineage)

    def __str__(self) -> str:
        """The text form that `shoal keys pin` takes: `<epoch>:<samples>:<lineage, 64 hex digits>`."""
        return tip_text(self.epoch, self.samples, self.lineage)


class Ballot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One attempt of a coordinator at the round of a tip. If two coordinators act for one tip, members follow the
    higher ballot and forget the lower one.

    Attributes:
        number: the number of the attempt; higher than all that the coordinator has heard of.
        coordinator: the key of the coordinator, so that no two peers hold the same ballot.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    coordinator: Digest


NO_BALLOT = Ballot(0, bytes(DIGEST_BYTES))  # lower than every coordinator's ballot
# A peer accepts attempts up to this many above the one that it follows. A coordinator accepts attempts in JOINs up to
# this many above the one that half of the members follow.
MAX_LEAP = 1 << 16
