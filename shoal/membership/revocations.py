"""Revocations: the owner's statement that memberships end before they expire."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.membership.membership import DAY, MAX_DAYS, Membership
from shoal.membership.signed import Key, Number, Seconds, Statement, StatementKind

MAX_REVOKED = 512


class Revoked(msgspec.Struct, frozen=True, array_like=True):
    """All memberships of a peer that were issued at or before the time `until` are void. (So the peer can be admitted
    again.)
    """

    peer: Key
    until: Seconds


class Revocations(Statement, frozen=True, array_like=True):
    """The list of void memberships. Only the list with the highest number counts.

    Attributes:
        run_id: the run.
        number: the number of this list.
        revoked: one entry for each peer.
    """

    number: Number
    revoked: Annotated[tuple[Revoked, ...], msgspec.Meta(max_length=MAX_REVOKED)]

    def __post_init__(self) -> None:
        if len({one.peer for one in self.revoked}) != len(self.revoked):
            raise ValueError("a peer is named twice")

    def voids(self, membership: Membership) -> bool:
        """Whether this list makes the membership void."""
        return any(one.peer == membership.peer and membership.issued <= one.until for one in self.revoked)

    def of_peer(self, key: bytes) -> Revoked | None:
        """The entry of that peer; None if there is none."""
        return next((one for one in self.revoked if one.peer == key), None)

    @classmethod
    def after(cls, last: Revocations | None, run_id: str, peers: list[bytes], now: float) -> Revocations:
        """The next list after `last`, which also ends the memberships of `peers`. Entries whose memberships have
        expired anyway are dropped.

        Raises:
            ValueError: if the list is full.
        """
        kept = {} if last is None else {one.peer: one for one in last.revoked if one.until > now - MAX_DAYS * DAY}
        kept |= {peer: Revoked(peer, int(now)) for peer in peers}
        if len(kept) > MAX_REVOKED:
            raise ValueError(
                f"a run's list of revocations has {MAX_REVOKED} places, and they are taken: begin a new run, with a "
                "new key, from the state of this one"
            )
        return cls(run_id, max(int(now), 1, 0 if last is None else last.number + 1), tuple(kept.values()))


REVOCATIONS = StatementKind("revocations", Revocations, max_bytes=24 << 10)
