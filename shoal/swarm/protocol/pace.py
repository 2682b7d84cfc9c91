"""Decides near the end of an epoch which peer begins another step, and which one waits because its samples would be
late.

[Note: why waiting costs nothing]
The round of an epoch is called when enough samples were reported, and begins when each member has completed the step
that it was in. A step that ends after the call delays the round, and its samples exceed the target: with N peers in
lockstep these are up to N - 1 steps too many. So a member that has reported a step asks whether to begin another. It is
told to wait if the others will have the missing samples without it:

- from steps that have begun, however long they take: the round waits for them in any case; or
- from steps that will have ended by the time at which the asking member would have ended its own.

In both cases its own step could not make the epoch end earlier. A member that waits has begun no step, so of the
members whose steps are needed one always goes on. The coordinator decides, one question at a time: peers that decided
for themselves would all wait for each other, or all go on.

Where each member makes a part of the epoch (inner steps), each one's steps are needed, so nobody asks. A member that
has its part waits for the round, and announces no step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

KEPT = 0.5  # a member whose step adds less than this fraction of the announced samples is unreliable
LATE = 1.0  # a step that is overdue by more than this fraction of its expected time is not relied on
MAX_STEPS_AHEAD = 64  # steps of one member that are predicted


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a member makes.

    Attributes:
        begun: when it began.
        samples: how many samples it will add.
        seconds: how long it is expected to take.
    """

    begun: float
    samples: float
    seconds: float

    def landings(self, now: float, horizon: float) -> Iterator[tuple[float, float, float]]:
        """Predict this step and the member's further steps until `horizon`. Yields for each when its samples arrive,
        how many they are, and until when others may rely on them. Yields nothing if the step is long overdue."""
        due = self.begun + self.seconds
        if now >= due + LATE * self.seconds:
            return
        first = max(due, now)
        yield first, self.samples, due + LATE * self.seconds
        for number in range(1, MAX_STEPS_AHEAD):
            end = first + number * self.seconds
            if end > horizon:
                return
            yield end, self.samples, end + LATE * self.seconds


class Pace:
    """The steps of a run's members in one epoch, as far as they report them. Time is an argument, in seconds.

    Args:
        target: the number of samples of all members at which the epoch ends.
        patience: a step that will end more than this many seconds from now is not relied on, because BEGIN would not
            wait for it either.
        unreliable: members whose last step, in this epoch or before, did not arrive as announced. They are not relied
            on until one does.
    """

    def __init__(self, target: float, patience: float = math.inf, unreliable: dict[bytes, None] | None = None) -> None:
        self._target, self._patience = target, patience
        self._unreliable = {} if unreliable is None else unreliable
        self._samples: dict[bytes, float] = {}
        self._steps: dict[bytes, Step] = {}

    def aim(self, target: float) -> None:
        """The members have changed, and the target with them."""
        self._target = target

    def reported(self, key: bytes, samples: float, step: float, seconds: float, asks: bool, now: float) -> float:
        """A member has reported.

        Args:
            key: the member.
            samples: how many samples it has.
            step: how many samples the step that it begins will add; 0 if it begins none.
            seconds: how long that step takes.
            asks: whether it asks before it begins the step.
            now: the time.

        Returns:
            For a member that `asks`: the seconds for which it should wait, because the others can be relied on for the
            missing samples. 0 means that it should begin.
        """
        before, added = self._steps.pop(key, None), samples - self._samples.get(key, 0.0)
        in_vain = before is not None and added <= 0
        if in_vain:
            self._unreliable[key] = None
        elif before is not None and added >= KEPT * before.samples:
            self._unreliable.pop(key, None)
        self._samples[key] = samples
        if step <= 0 or seconds <= 0:
            return 0.0
        wait = self._until_target(now, seconds) if asks and samples > 0 else 0.0
        if not wait and not in_vain:  # no member waits for one whose steps add nothing
            self._steps[key] = Step(now, step, seconds)
        return wait

    def lost(self, key: bytes) -> None:
        """That member is lost, and its report is void."""
        self._samples.pop(key, None)
        self._steps.pop(key, None)

    def is_in_a_step(self, key: bytes, now: float) -> bool:
        """Whether that member has announced a step that is not overdue."""
        step = self._steps.get(key)
        return step is not None and now < step.begun + step.seconds

    def late(self, now: float) -> list[bytes]:
        """The members whose announced steps are overdue."""
        return [key for key, step in self._steps.items() if now >= step.begun + step.seconds]

    def under_way(self, but: bytes) -> float:
        """The samples of all steps that have begun and were not reported yet, except those of the member `but`."""
        return sum(step.samples for key, step in self._steps.items() if key != but and key not in self._unreliable)

    def _until_target(self, now: float, seconds: float) -> float:
        """The seconds for which the steps that have begun can be relied on to reach the target without another step,
        which would take `seconds`. 0 if they will not reach it."""
        missing = self._target - sum(self._samples.values())
        until = now
        for key, step in self._steps.items():
            if now >= step.begun + (1.0 + LATE) * step.seconds:
                self._unreliable[key] = None
        relied_on = [step for key, step in self._steps.items() if key not in self._unreliable]
        near = [step for step in relied_on if step.begun + step.seconds <= now + self._patience]
        landings = (landing for step in near for landing in step.landings(now, now + seconds))
        for _end, samples, counted_on in sorted(landings):
            if missing <= 0:
                break
            missing -= samples
            until = max(until, counted_on)
        return until - now if missing <= 0 else 0.0
