"""Limits how often something is reported about one peer, which may make it up, or of one kind."""

from __future__ import annotations

from collections import deque

MAX_PEERS = 1024  # peers that are remembered


class Sparing:
    """Allows `most` reports within `seconds` for each peer."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._times: dict[bytes, deque[float]] = {}  # by peer: when the last reports were allowed

    def allows(self, key: bytes, now: float) -> bool:
        """Whether one more report about that peer is allowed. If so, it counts as made."""
        times = self._times.setdefault(key, deque(maxlen=self._most))
        if len(times) == self._most and now - times[0] < self._seconds:
            return False
        times.append(now)
        if len(self._times) > MAX_PEERS:
            del self._times[next(iter(self._times))]
        return True
