"""Memory that all links share for large messages that have not come whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.p2p.link import Link

PATIENCE = 10.0  # seconds that a message may take while others wait for its memory


class Budget:
    """Who holds how much of `free` bytes. Each link holds one piece of memory at most."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._since: dict[Link, float] = {}  # who holds some: the oldest first
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def memory(self, link: Link, size: int) -> AsyncIterator[None]:
        """`link` may use so much, as soon as there is some. While others wait, the one that has held its memory for
        longest ends after PATIENCE seconds."""
        async with self._turn:
            while size > self.free:
                self._freed.clear()
                oldest, since = next(iter(self._since.items()))
                try:
                    async with asyncio.timeout_at(since + PATIENCE):
                        await self._freed.wait()
                except TimeoutError:
                    oldest.end("its message took too long")
            self.free -= size
            self._since[link] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._since[link]
            self.free += size
            self._freed.set()
