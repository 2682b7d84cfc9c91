"""Memory for the chunks of lanes. It is reused, because fresh memory from the kernel costs as much time as a cipher."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections import deque
from typing import Final

_SMALLEST_BITS: Final = 16
_SPARE: Final = 1 << 10  # bytes beyond a power of two, for those that sealing adds to a payload of that size
KEPT_BYTES: Final = 64 << 20  # bytes of each size
ASK_AGAIN: Final = 0.05  # seconds; returned memory can't trigger a callback, see `_back`


class Buffers:
    """A pool of buffers for any thread. A buffer returns to the pool when nobody refers to it any more.

    Args:
        limit: bytes that may be in use at once.
    """

    def __init__(self, limit: int) -> None:
        self._left, self._missed_at = limit, float("-inf")
        self._free: dict[int, deque[bytearray]] = {}
        self._lock = threading.Lock()
        # A buffer returns on any thread and at any moment, so its return takes no lock.
        self._back: queue.SimpleQueue[bytearray] = queue.SimpleQueue()

    def take(self, nbytes: int) -> memoryview | None:
        """A buffer of `nbytes` bytes with arbitrary content. None if there is none now: ask again after ASK_AGAIN."""
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
