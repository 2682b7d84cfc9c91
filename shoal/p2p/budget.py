"""Memory that all links share, for large messages that have not arrived completely."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

PATIENCE = 10.0  # seconds that a message may take while others wait for its memory


class _Holder(Protocol):
    """Has a piece of a budget."""

    def end(self, reason: str) -> None:
        """Give everything back, because others wait for it."""


class Budget:
    """Shares a number of bytes among holders. Each holder has one piece at most, and holders may wait for theirs.

    Args:
        free: the number of bytes.

    Attributes:
        free: the number of bytes that nobody holds.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self._held: dict[_Holder, tuple[int, float]] = {}  # (bytes, since when), the oldest first
        self._waiting: list[Callable[[], object]] = []

    def take(self, holder: _Holder, size: int, resume: Callable[[], object]) -> bool:
        """Take memory, if there is enough and nobody else waits.

        Args:
            holder: the holder that takes it.
            size: the number of bytes.
            resume: called on the loop when memory is given back, if there was not enough. The holder must then ask
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

    def give(self, holder: _Holder) -> None:
        """Give back the memory of a holder, if it has some. All waiting holders ask again."""
        self.free += self._held.pop(holder, (0, 0.0))[0]
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            asyncio.get_running_loop().call_soon(resume)

    def overdue(self) -> _Holder | None:
        """The holder that has had its memory for longest, if others wait and it has had it for too long; otherwise
        None.
        """
        for holder, (_, since) in self._held.items():
            return holder if self._waiting and time.monotonic() - since > PATIENCE else None
        return None
