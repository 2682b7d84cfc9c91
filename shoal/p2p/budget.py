"""Memory that all links share for large messages that have not come whole."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.p2p.link import Link

PATIENCE = 10.0  # seconds that a message may take while others wait for its memory


class Budget:
    """Who holds how much of `free` bytes, and who waits for some, in turn. Each link holds one piece at most."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._held: dict[Link, tuple[int, float]] = {}  # how much, since when: the oldest first
        self._waiting: list[Link] = []

    def take(self, link: Link, size: int) -> bool:
        """Whether `link` has so much now; else it is resumed when it is to ask again."""
        if self._waiting or size > self.free:
            self._waiting.append(link)
            return False
        self.free -= size
        self._held[link] = size, time.monotonic()
        return True

    def give(self, link: Link) -> None:
        """`link` needs its memory no more, or waits no more."""
        self.free += self._held.pop(link, (0, 0.0))[0]
        waiting, self._waiting = self._waiting, []
        for other in waiting:
            asyncio.get_running_loop().call_soon(other.resume)

    def look(self) -> None:
        """End the link that keeps others waiting for too long: the one that has had its memory for longest."""
        for link, (_, since) in list(self._held.items())[:1]:
            if self._waiting and time.monotonic() - since > PATIENCE:
                link.end("its message took too long")
