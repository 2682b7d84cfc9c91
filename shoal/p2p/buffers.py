"""Memory for what comes and goes over lanes. It is used again and again: memory that is fresh from the kernel costs as
much as a cipher."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections import deque
from typing import Final

_SMALLEST_BITS: Final = 16
_SPARE: Final = 1 << 10  # beyond a power of two: for what sealing adds to a payload of that size
KEPT_BYTES: Final = 64 << 20  # of each size
ASK_AGAIN: Final = 0.05  # seconds; who gives memory back can't call anybody, see `_back`


class Buffers:
    """A pool, for any thread. A buffer comes back when nobody refers to it any more.

    Args:
        limit: bytes that may be out at once.
    """

    def __init__(self, limit: int) -> None:
        self._left, self._missed_at = limit, float("-inf")
        self._free: dict[int, deque[bytearray]] = {}
        self._lock = threading.Lock()
        # A buffer comes back in any thread, in the middle of anything: so without a lock.
        self._back: queue.SimpleQueue[bytearray] = queue.SimpleQueue()

    def take(self, nbytes: int) -> memoryview | None:
        """A buffer of so many bytes, with anything in it; None if there is none now: ask again after ASK_AGAIN."""
        size = (1 << max(_SMALLEST_BITS, (nbytes - _SPARE - 1).bit_length())) + _SPARE
        with self._lock:
            while not self._back.empty():
                memory = self._back.get()
                self._left += len(memory)
                self._free.setdefault(len(memory), deque(maxlen=KEPT_BYTES // len(memory))).append(memory)
            if size > self._left:
                self._missed_at = time.monotonic()
                return None
            self._left -= size
            free = self._free.get(size)
            memory = free.pop() if free else bytearray(size)
        lent = (ctypes.c_ubyte * size).from_buffer(memory)
        weakref.finalize(lent, self._back.put, memory).atexit = False
        return memoryview(lent).cast("B")[:nbytes]

    @property
    def is_missed(self) -> bool:
        """Whether somebody waits for memory."""
        return time.monotonic() - self._missed_at < 10 * ASK_AGAIN
