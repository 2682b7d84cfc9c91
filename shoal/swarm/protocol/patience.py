"""How long this peer waits for each of the others in a round."""

from __future__ import annotations

import math

SHORTEST_SECONDS = 2.0
FORGIVEN_SECONDS = 100.0  # in this time, one time that a member has held up a round is forgotten
MAX_KEPT = 4096  # members that are remembered
MOST_TIMES = 16.0
OFTEN = 1.5  # a member that has held up rounds so often lately is in none for a while
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0  # seconds for which such a member is in no round


class Patience:
    """How long a round waits for each member: half as long with each time that the member has held up a round lately.

    A member that holds up every round costs its full time-out once, and little afterwards. One that does so now and
    then costs a small share of the time. Time is an argument, in seconds of any clock."""

    def __init__(self) -> None:
        self._times: dict[bytes, tuple[float, float]] = {}  # how often each has held up a round, and when it last did
        self._held: set[bytes] = set()  # members that have held up the round of this tip
        # By member that was put out of a round: the coordinators that did so, and when.
        self._put_out: dict[bytes, dict[bytes, float]] = {}

    @property
    def remembers(self) -> bool:
        """Whether any member has ever held up a round."""
        return bool(self._times)

    def _lately(self, key: bytes, now: float) -> float:
        times, last = self._times.get(key, (0.0, now))
        return max(0.0, times - (now - last) / FORGIVEN_SECONDS)

    def of(self, key: bytes, seconds: float, now: float) -> float:
        """How many seconds to wait for that member, if others are waited for `seconds`."""
        return max(min(seconds, SHORTEST_SECONDS), seconds * math.exp2(-self._lately(key, now)))

    def is_over(self, key: bytes, now: float) -> bool:
        """Whether that member has held up rounds so often that it is in none for a while."""
        times, last = self._times.get(key, (0.0, now))
        return times >= OFTEN and now - last < min(FIRST_PAUSE * math.exp2(times - OFTEN), LONGEST_PAUSE)

    def held_up(self, key: bytes, now: float) -> None:
        """That member has held up a round. It counts once for each tip."""
        if key not in self._held:
            self._held.add(key)
            times = min(self._lately(key, now) + 1.0, MOST_TIMES)
            self._times.pop(key, None)
            self._times[key] = times, now
            if len(self._times) > MAX_KEPT:
                del self._times[next(iter(self._times))]

    def put_out(self, key: bytes, coordinator: bytes, now: float, *, led: bool = False) -> None:
        """A round was committed without a member that was put out of it, although it answers.

        It has held up the round if at least two coordinators put it out lately, or this peer did. A single other
        coordinator may lie.

        Args:
            key: the member.
            coordinator: the peer that committed the round.
            now: the time.
            led: whether this peer was the coordinator.
        """
        said = self._put_out.pop(key, {})
        said = {other: at for other, at in said.items() if now - at < FORGIVEN_SECONDS and other != coordinator}
        if led or said:
            self.held_up(key, now)
        self._put_out[key] = {**said, coordinator: now}
        if len(self._put_out) > MAX_KEPT:
            del self._put_out[next(iter(self._put_out))]

    def new_tip(self) -> None:
        """From now on, complaints are about the round of another tip."""
        self._held.clear()
