"""What each member brought to the last commits: how many samples of it count before the next one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median

from shoal.swarm.protocol.patience import Patience

COMMITS = 3
MAX_KEPT = 4096  # of each kind of members that are remembered
LEAP = 2.0  # a member counts for at most so many times what it brought before


class History:
    """The shares of members in the last commits, and how long an epoch takes.

    A member that says that it has a thousand times as many samples as before is wrong, or lies; one that has become
    twice as fast counts in full. Whatever is said, more counts as the epoch takes longer than usual: else a run would
    stand when those that brought the most are idle.

    Attributes:
        brought: what each member has brought to the last commit, as it says.
        unreliable: members whose last step did not come as they announced it, see `Pace`.
        absent: how often members that reported samples were not in the round that was called, since they last were in
            one.
        hurries_until: before this time BEGIN does not wait for all that have reported: it has done so in vain.
        punctuality: how long BEGIN waits for members whose JOINs this peer, as the coordinator, has waited for in vain.
    """

    def __init__(self) -> None:
        self._shares: deque[dict[bytes, float]] = deque(maxlen=COMMITS)
        self._times: deque[float] = deque(maxlen=COMMITS + 1)  # of the commits
        self.brought: Mapping[bytes, float] = {}
        self.unreliable: dict[bytes, None] = {}
        self.absent: dict[bytes, int] = {}
        self.hurries_until = -math.inf
        self.punctuality = Patience()

    def committed(self, weights: Mapping[bytes, float], now: float) -> None:
        """A round was committed to which these members brought so many samples."""
        for key in weights:
            self.absent.pop(key, None)
        for keys in (self.absent, self.unreliable):
            for key in list(keys)[:-MAX_KEPT]:
                del keys[key]
        total = sum(weights.values())
        if total > 0:
            self._shares.append({key: weight / total for key, weight in weights.items()})
            self._times.append(now)
            self.brought = dict(weights)

    def skipped(self) -> None:
        """This peer is at a state to which it did not come by the rounds that it knows."""
        self._shares.clear()
        self._times.clear()
        self.brought = {}

    def missed(self, keys: Iterable[bytes]) -> None:
        """These have reported samples, and a round begins without them."""
        for key in keys:
            self.absent[key] = self.absent.get(key, 0) + 1

    def is_awaited(self, key: bytes) -> bool:
        """Whether BEGIN waits for that member when it has reported samples. One that was in none of the last rounds is
        awaited in the 2nd, 4th, 8th, … of them: one that is only slow would otherwise be late for ever."""
        times = self.absent.get(key, 0)
        return times != 1 and times & (times - 1) == 0

    @property
    def last(self) -> Mapping[bytes, float]:
        """The shares in the last commit; empty if it is not known."""
        return self._shares[-1] if self._shares else {}

    def most(self, key: bytes, target: float, now: float) -> float:
        """For how many samples that member counts at most, on the way to `target` of all; infinity if nothing is known
        of earlier epochs."""
        if len(self._times) < 2:
            return math.inf
        share = [shares[key] for shares in self._shares if key in shares]
        usual = max(share, default=0.0)
        if len(share) < COMMITS:  # it may be as fast as the fastest, and may have come in the middle of an epoch
            usual = max(usual, *self.last.values())
        least = 0.5 / len(self.last)  # of one that was idle
        seconds = median(after - before for before, after in pairwise(self._times))
        longer = max(1.0, (now - self._times[-1]) / seconds) if seconds > 0 else math.inf
        return LEAP * max(usual, least) * target * longer
