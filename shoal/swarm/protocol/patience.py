"""How long this peer waits for each of the others in a round."""

from __future__ import annotations

import math
from collections.abc import Collection

SHORTEST_SECONDS = 2.0
FORGIVEN_SECONDS = 100.0  # after which one time that a member held a round up is forgotten
MAX_KEPT = 4096  # members that are remembered
MOST_TIMES = 16.0
OFTEN = 1.5  # times lately; then it is in no round for a while
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0  # seconds


class Patience:
    """Half as long for each time that a member has held a round up lately. One that does so in every round costs its
    time-out once, and then little; one that does so at times costs a small share of the time, whatever it does in
    between. Time is an argument, in seconds of any clock."""

    def __init__(self) -> None:
        self._times: dict[bytes, tuple[float, float]] = {}  # how often each had held a round up, and when it last did
        self._held: set[bytes] = set()  # who has held up the round of this tip
        self._put_out: dict[bytes, dict[bytes, float]] = {}  # who was put out of a round, by whom, and when

    @property
    def remembers(self) -> bool:
        """Whether anybody has held up a round, at any time."""
        return bool(self._times)

    def _lately(self, key: bytes, now: float) -> float:
        times, last = self._times.get(key, (0.0, now))
        return max(0.0, times - (now - last) / FORGIVEN_SECONDS)

    def of(self, key: bytes, seconds: float, now: float) -> float:
        """How many seconds that member is waited for, where others are for `seconds`."""
        return max(min(seconds, SHORTEST_SECONDS), seconds * math.exp2(-self._lately(key, now)))

    def is_over(self, key: bytes, now: float) -> bool:
        """Whether that member has held rounds up so often that it is in none for a while."""
        times, last = self._times.get(key, (0.0, now))
        return times >= OFTEN and now - last < min(FIRST_PAUSE * math.exp2(times - OFTEN), LONGEST_PAUSE)

    def held_up(self, key: bytes, now: float) -> None:
        """That member is complained of; once at a tip counts."""
        if key not in self._held:
            self._held.add(key)
            times = min(self._lately(key, now) + 1.0, MOST_TIMES)
            self._times.pop(key, None)
            self._times[key] = times, now
            if len(self._times) > MAX_KEPT:
                del self._times[next(iter(self._times))]

    def committed(self, out: Collection[bytes], coordinator: bytes, now: float, *, led: bool = False) -> None:
        """A round was committed; that coordinator has put these out of it. What one says alone does not count, unless
        it is this peer: it may lie."""
        for key in out:
            said = self._put_out.pop(key, {})
            said = {other: at for other, at in said.items() if now - at < FORGIVEN_SECONDS and other != coordinator}
            if led or said:
                self.held_up(key, now)
            self._put_out[key] = {**said, coordinator: now}
            if len(self._put_out) > MAX_KEPT:
                del self._put_out[next(iter(self._put_out))]
        self.new_tip()

    def new_tip(self) -> None:
        """What is complained of from now on is another round."""
        self._held.clear()
