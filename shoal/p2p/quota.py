"""Limits on how much work one identity may cause this peer. No I/O; callers give the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

MAX_IDENTITIES = 4096  # whose use is remembered; the one that has been quiet for longest is forgotten


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per second, and an amount at once after a pause."""

    per_second: float
    at_once: float


class Quota:
    """A token bucket for each identity.

    Args:
        rate: the rate for each identity.
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._used: dict[Hashable, tuple[float, float]] = {}  # (amount used, when), the quietest identity first

    def allows(self, who: Hashable, amount: float, now: float) -> bool:
        """Whether `who` may use `amount` now."""
        return self._level(who, now) + amount <= self._rate.at_once

    def use(self, who: Hashable, amount: float, now: float) -> bool:
        """Let `who` use `amount`, if it may; returns whether it may."""
        level = self._level(who, now) + amount
        if level > self._rate.at_once:
            return False
        self._used.pop(who, None)
        self._used[who] = (level, now)
        if len(self._used) > MAX_IDENTITIES:
            del self._used[next(iter(self._used))]
        return True

    def _level(self, who: Hashable, now: float) -> float:
        level, since = self._used.get(who, (0.0, now))
        return max(0.0, level - (now - since) * self._rate.per_second)
