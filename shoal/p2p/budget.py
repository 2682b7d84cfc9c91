"""Memory that all links share for messages that have not come whole. No I/O; time is given."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

PATIENCE = 10.0  # seconds that a message may take while others wait for its memory

T = TypeVar("T")


class Budget(Generic[T]):
    """Who holds how much of `total` bytes, and who waits for some. Each holds one piece of memory at most."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: dict[T, tuple[int, float]] = {}  # how much, since when: the oldest first
        self._waiting: deque[tuple[T, int]] = deque()

    def take(self, holder: T, size: int, now: float) -> bool:
        """Whether `holder` has the memory; else it waits, until `give` names it."""
        if self._waiting or size > self._free:
            self._waiting.append((holder, size))
            return False
        self._hold(holder, size, now)
        return True

    def give(self, holder: T, now: float) -> list[T]:
        """`holder` needs its memory no more, or waits no more; who has what it waited for now."""
        self._free += self._held.pop(holder, (0, 0.0))[0]
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != holder)
        served = []
        while self._waiting and self._waiting[0][1] <= self._free:
            other, size = self._waiting.popleft()
            self._hold(other, size, now)
            served.append(other)
        return served

    def overdue(self, now: float) -> T | None:
        """Who has had its memory for longest, if others wait and it has had it for more than PATIENCE seconds."""
        for holder, (_, since) in self._held.items():
            return holder if self._waiting and now - since > PATIENCE else None
        return None

    def _hold(self, holder: T, size: int, now: float) -> None:
        self._free -= size
        self._held[holder] = (size, now)
