"""How long this peer waits for each of the others in a round."""

from __future__ import annotations

import math
from collections.abc import Collection

SHORTEST_SECONDS = 2.0
FORGIVEN = 0.25  # of one time that a member held a round up, by each round that it does not
MAX_KEPT = 4096  # members that are remembered
MOST_TIMES = 16.0
OFTEN = 2.0  # times; then it is in no round for a while
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0  # seconds


class Patience:
    """Half as long for each time that a member has held a round up lately: one that keeps back in every round what it
    owes costs its time-out once, and then little. Time is an argument, in seconds of any clock."""

    def __init__(self) -> None:
        self._times: dict[bytes, float] = {}  # how often each has held a round up, of late
        self._held: set[bytes] = set()  # who has held up the round of this tip
        self._last: dict[bytes, float] = {}  # when each did so last

    def of(self, key: bytes, seconds: float) -> float:
        """How many seconds that member is waited for, where others are for `seconds`."""
        return max(min(seconds, SHORTEST_SECONDS), seconds * math.exp2(-self._times.get(key, 0.0)))

    def is_over(self, key: bytes, now: float) -> bool:
        """Whether that member has held rounds up so often that it is in none for a while."""
        times = self._times.get(key, 0.0)
        return times >= OFTEN and now - self._last[key] < min(FIRST_PAUSE * math.exp2(times - OFTEN), LONGEST_PAUSE)

    def held_up(self, key: bytes, now: float) -> None:
        """That member is complained of; once at a tip counts."""
        if key not in self._held:
            self._held.add(key)
            self._last[key] = now
            self._times[key] = min(self._times.pop(key, 0.0) + 1.0, MOST_TIMES)
            if len(self._times) > MAX_KEPT:
                self._forget(next(iter(self._times)))

    def _forget(self, key: bytes) -> None:
        del self._times[key], self._last[key]

    def committed(self, members: Collection[bytes], out: Collection[bytes], now: float) -> None:
        """A round of these members was committed, without those that were put out of it."""
        for key in out:
            self.held_up(key, now)
        for key in members if self._times else ():
            if key not in self._held and key in self._times:
                self._times[key] -= FORGIVEN
                if self._times[key] <= 0:
                    self._forget(key)
        self._held.clear()
