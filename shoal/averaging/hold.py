"""Holding a lock that other threads use, for as long as one task on the loop needs it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future


class Hold:
    """One task's claim to a lock: taken at most once, and given back even if the task ends before it got it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._taken: Future[None] | None = None
        self._over = False

    async def take(self) -> bool:
        """Wait for the lock without holding up the loop; false if `release` was called meanwhile."""
        if self._over:
            return False
        if self._taken is None:
            self._taken = Future()
            self._taken.set_running_or_notify_cancel()  # so that who is cancelled while it waits cancels nothing
            if self._lock.acquire(blocking=False):
                self._taken.set_result(None)
            else:
                threading.Thread(target=self._wait, args=(self._taken,), name="shoal-hold", daemon=True).start()
        await asyncio.wrap_future(self._taken)
        return not self._over

    def _wait(self, taken: Future[None]) -> None:
        self._lock.acquire()
        taken.set_result(None)

    def release(self) -> None:
        """Give the lock back, or claim it no more; it may still have to be waited for, and is given back then."""
        self._over = True
        if self._taken is not None:
            self._taken.add_done_callback(lambda _: self._lock.release())
