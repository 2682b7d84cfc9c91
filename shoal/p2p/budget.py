"""Memory that all links share for large messages that have not arrived completely."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

PATIENCE = 10.0  # seconds that a message may take while others wait for its memory

Holder = TypeVar("Holder", bound=Hashable)


class Budget(Generic[Holder]):
    """Who holds how much of a number of bytes, and who waits for some. Each holder has one piece at most.

    Args:
        free: the number of bytes.

    Attributes:
        free: how many of them nobody holds.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self._held: dict[Holder, tuple[int, float]] = {}  # how much, since when: the oldest first
        self._waiting: list[Callable[[], object]] = []

    def take(self, holder: Holder, size: int, resume: Callable[[], object]) -> bool:
        """Takes memory, if there is enough and nobody else waits.

        Args:
            holder: who takes it.
            size: how many bytes.
            resume: called from the loop when memory was given back, if there was not enough. The holder must then ask
                again.

        Returns:
            Whether the holder has the memory now.
        """
        if self._waiting or size > self.free:
            self._waiting.append(resume)
            return False
        self.free -= size
        self._held[holder] = size, time.monotonic()
        return True

    def give(self, holder: Holder) -> None:
        """Gives back the memory of a holder, if it has some. All who wait ask again."""
        self.free += self._held.pop(holder, (0, 0.0))[0]
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            asyncio.get_running_loop().call_soon(resume)

    def overdue(self) -> Holder | None:
        """The holder that keeps others waiting for too long: the one that has had its memory for longest."""
        for holder, (_, since) in self._held.items():
            return holder if self._waiting and time.monotonic() - since > PATIENCE else None
        return None
