"""When to dial missing peers. No I/O; callers give the time."""

from __future__ import annotations

import random

from shoal.p2p.identity import PeerID

SHORTEST, LONGEST = 5.0, 60.0  # seconds between two dials of a peer
NOTICED = 1.0  # seconds from a loss to the first dial
BACK_OFF = 4  # a peer is dialled again after a fourth of the time for which it has been missing, within these bounds
JITTER = 0.2  # up to this fraction of an interval is added, so that peers that lost each other do not dial in step


class Redial:
    """Says when to dial missing peers: every 5 to 60 s, less often the longer a peer is missing.

    So a peer that was away for some time is found again after at most 5 s, or about a fourth of that time. If only the
    connection was lost, it is found after 1 s.

    Args:
        rng: draws the jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PeerID, float] = {}
        self._next: dict[PeerID, float] = {}

    def missing(self, peer: PeerID, now: float, *, at_once: bool = False) -> None:
        """`peer` is missing from now on, unless it was missing before.

        It is dialled `at_once`, or after 1 s: perhaps only the connection was lost, and by then both sides have
        noticed.
        """
        if peer not in self._since:
            self._since[peer] = now
            self._next[peer] = now if at_once else now + NOTICED * (1 + JITTER * self._rng.random())

    def hurry(self, peer: PeerID, now: float) -> None:
        """There is a reason to think that `peer` can be reached now. If it is missing, dial it at once."""
        if peer in self._next:
            self._next[peer] = now

    def found(self, peer: PeerID) -> None:
        """`peer` is no longer missing."""
        self._since.pop(peer, None)
        self._next.pop(peer, None)

    def due(self, now: float) -> list[PeerID]:
        """The peers to dial now."""
        due = [peer for peer, when in self._next.items() if when <= now]
        for peer in due:
            self._next[peer] = now + self._interval(now - self._since[peer])
        return due

    def next_time(self) -> float | None:
        """When the next dial is due; None if no peer is missing."""
        return min(self._next.values(), default=None)

    def _interval(self, missing_for: float) -> float:
        interval = max(SHORTEST, missing_for / BACK_OFF) * (1 + JITTER * self._rng.random())
        return min(interval, LONGEST)
