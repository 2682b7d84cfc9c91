"""When to dial the peers that are missing. No I/O; time is given."""

from __future__ import annotations

import random

from shoal.p2p.identity import PeerID

SHORTEST, LONGEST = 5.0, 60.0  # seconds between two dials of a peer
NOTICED = 1.0  # seconds from a loss to the first dial
BACK_OFF = 4  # a peer is dialled after a fourth of the time for which it is missing, within these bounds
JITTER = 0.2  # at most this part of an interval is added, so that peers that lost each other do not dial in step


class Redial:
    """Dials each missing peer every 5 to 60 s, for as long as it is missing: the longer, the less often.

    So a peer that was away for some time is found again after at most 5 s, or about a fourth of that time; where only
    the connection was lost, after 1 s.

    Args:
        rng: draws the jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PeerID, float] = {}
        self._next: dict[PeerID, float] = {}

    def missing(self, peer: PeerID, now: float, *, at_once: bool = False) -> None:
        """`peer` is missing since now, unless it was missing before. It is dialled `at_once`; or after 1 s, when both
        sides have noticed, since it may have been the connection only."""
        if peer not in self._since:
            self._since[peer] = now
            self._next[peer] = now if at_once else now + NOTICED * (1 + JITTER * self._rng.random())

    def hurry(self, peer: PeerID, now: float) -> None:
        """There is a reason to think that `peer`, if it is missing, can be reached now: dial it at once."""
        if peer in self._next:
            self._next[peer] = now

    def found(self, peer: PeerID) -> None:
        """`peer` is missing no longer."""
        self._since.pop(peer, None)
        self._next.pop(peer, None)

    def due(self, now: float) -> list[PeerID]:
        """Whom to dial now."""
        due = [peer for peer, when in self._next.items() if when <= now]
        for peer in due:
            self._next[peer] = now + self._interval(now - self._since[peer])
        return due

    def next_time(self) -> float | None:
        """When the next dial is due; None if nobody is missing."""
        return min(self._next.values(), default=None)

    def _interval(self, missing_for: float) -> float:
        interval = max(SHORTEST, missing_for / BACK_OFF) * (1 + JITTER * self._rng.random())
        return min(interval, LONGEST)
