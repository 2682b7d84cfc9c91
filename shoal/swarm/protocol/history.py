"""The samples of each member in the last commits, which limit how many of its samples count before the next one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median

from shoal.swarm.protocol.newcomers import Newcomers
from shoal.swarm.protocol.patience import Patience

COMMITS = 3
MAX_KEPT = 4096  # members in each of the collections below
LEAP = 2.0  # a member counts for at most this many times its usual samples


class History:
    """The shares of members in the last commits, and how long an epoch takes.

    A member that claims a thousand times as many samples as before is wrong, or lies. One that has become twice as fast
    counts in full. The limit grows when an epoch takes longer than usual: otherwise a run would stand still when the
    members with the most samples become idle.

    Args:
        share: the share of the run's time that rounds may wait for newcomers.

    Attributes:
        brought: the samples that each member brought to the last commit, as it says.
        unreliable: members whose last step did not arrive as announced, see `Pace`.
        absent: by member: how many rounds in a row have begun without it although it had reported samples.
        hurries_until: before this time BEGIN does not wait for all that have reported samples, because it has done so
            in vain.
        punctuality: how long BEGIN waits for each member. It shrinks for members whose JOINs this peer, as the
            coordinator, has waited for in vain.
        newcomers: whether rounds may wait for newcomers, and until when.
    """

    def __init__(self, share: float = 0.0) -> None:
        self._shares: deque[dict[bytes, float]] = deque(maxlen=COMMITS)
        self._times: deque[float] = deque(maxlen=COMMITS + 1)  # when each of the last rounds was committed
        self.brought: Mapping[bytes, float] = {}
        self.unreliable: dict[bytes, None] = {}
        self.absent: dict[bytes, int] = {}
        self.hurries_until = -math.inf
        self.punctuality = Patience()
        self.newcomers = Newcomers(share)

    def committed(self, weights: Mapping[bytes, float], now: float) -> None:
        """A round was committed. `weights` are the samples that each member brought."""
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
        """Forget the commits: this peer has come to its state in another way than by the rounds that it knows."""
        self._shares.clear()
        self._times.clear()
        self.brought = {}

    def missed(self, keys: Iterable[bytes]) -> None:
        """A round begins without these members, which have reported samples."""
        for key in keys:
            self.absent[key] = self.absent.get(key, 0) + 1

    def rest(self, until: float) -> None:
        """BEGIN has waited for all members in vain, and does not do so again before that time."""
        self.hurries_until = until

    def is_awaited(self, key: bytes) -> bool:
        """Whether BEGIN waits for that member if it has reported samples. After n rounds without the member, BEGIN
        waits for it if n is 0, 2, 4, 8, 16, …: without that, a member that is only slow would be late for ever."""
        times = self.absent.get(key, 0)
        return times != 1 and times & (times - 1) == 0

    @property
    def epoch_seconds(self) -> float:
        """The seconds that an epoch takes; 0 if that is not known."""
        return median(after - before for before, after in pairwise(self._times)) if len(self._times) > 1 else 0.0

    @property
    def last(self) -> Mapping[bytes, float]:
        """The members' shares of the last commit; empty if that is not known."""
        return self._shares[-1] if self._shares else {}

    def most(self, key: bytes, target: float, now: float) -> float:
        """The most samples that count of that member in an epoch of `target` samples; infinity if earlier epochs are
        not known."""
        if len(self._times) < 2:
            return math.inf
        share = [shares[key] for shares in self._shares if key in shares]
        usual = max(share, default=0.0)
        if len(share) < COMMITS:  # it may be as fast as the fastest, and may have joined in the middle of an epoch
            usual = max(usual, *self.last.values())
        least = 0.5 / len(self.last)  # for a member that was idle
        seconds = self.epoch_seconds
        longer = max(1.0, (now - self._times[-1]) / seconds) if seconds > 0 else math.inf
        return LEAP * max(usual, least) * target * longer
