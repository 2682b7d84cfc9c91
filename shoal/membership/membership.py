"""A membership: the owner's statement that a peer may take part in a closed run, in which parts, and until when."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from shoal.membership.signed import Key, Number, Seconds, Statement, StatementKind
from shoal.p2p.identity import PeerID

MAX_DAYS = 366
DAY = 86400


class Part(Enum):
    """What a member of a closed run may do."""

    TRAIN = "train"  # everything: contribute, reduce, coordinate, give and get the state
    CLIENT = "client"  # contribute and get the state, as a peer that nobody dials
    AUXILIARY = "auxiliary"  # only reduce
    WATCH = "watch"  # only read the run's progress


_INCLUDES = {
    Part.TRAIN: frozenset(Part),
    Part.CLIENT: frozenset((Part.CLIENT, Part.WATCH)),
    Part.AUXILIARY: frozenset((Part.AUXILIARY, Part.WATCH)),
    Part.WATCH: frozenset((Part.WATCH,)),
}


class Membership(Statement, frozen=True, array_like=True):
    """A peer may take part in a run.

    Attributes:
        run_id: the run.
        peer: the public key of the peer. The connection proves that the sender has this key, so the text is no secret.
        parts: the parts that the peer may take.
        issued, expires: in seconds since 1970.
        serial: grows with each membership of the run.
    """

    peer: Key
    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=len(Part))]
    issued: Seconds
    expires: Seconds
    serial: Number

    def __post_init__(self) -> None:
        if len(set(self.parts)) != len(self.parts):
            raise ValueError("a part is named twice")
        if not self.issued < self.expires <= self.issued + MAX_DAYS * DAY:
            raise ValueError(f"a membership lasts at most {MAX_DAYS} days, and ends after it was issued")

    @property
    def peer_id(self) -> PeerID:
        """The peer whose membership this is."""
        return PeerID(self.peer)

    def permits(self, part: Part) -> bool:
        """Whether the member may take that part. "train" includes all other parts, and each part includes "watch"."""
        return any(part in _INCLUDES[given] for given in self.parts)

    def is_valid(self, now: float) -> bool:
        """Whether it has not expired; `now` in seconds since 1970."""
        return now < self.expires


MEMBERSHIP = StatementKind("membership", Membership, max_bytes=384)
