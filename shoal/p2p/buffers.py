"""Buffers that are used again and again: memory of the kernel's is cleared before it is given, which costs as much as a
cipher."""

from __future__ import annotations

import threading
from typing import Final

from shoal.p2p.errors import P2PError

_SMALLEST_BITS: Final = 16
_SPARE: Final = 1 << 10  # beyond a power of two: for what sealing adds to a payload of that size
KEPT_BYTES: Final = 64 << 20


class NoMemory(P2PError):
    """More is under way than may be held."""


class Buffers:
    """A pool of buffers, for any thread.

    Args:
        limit: bytes that may be out at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._out, self._kept = limit, 0, 0
        self._free: dict[int, list[bytearray]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """A buffer of so many bytes, with anything in it. Raises NoMemory."""
        size = (1 << max(_SMALLEST_BITS, (nbytes - _SPARE - 1).bit_length())) + _SPARE
        with self._lock:
            if self._out + size > self._limit:
                raise NoMemory(
                    f"{self._out} bytes of chunks are under way or wait to be used; the limit is {self._limit}"
                )
            self._out += size
            free = self._free.get(size)
            if free:
                self._kept -= size
                return memoryview(free.pop())[:nbytes]
        return memoryview(bytearray(size))[:nbytes]

    def put(self, buffer: memoryview, *, reuse: bool = True) -> None:
        """It is not used any more; without `reuse`, somebody may still look at it."""
        memory = buffer.obj
        assert isinstance(memory, bytearray)
        with self._lock:
            self._out -= len(memory)
            if reuse and self._kept + len(memory) <= KEPT_BYTES:
                self._kept += len(memory)
                self._free.setdefault(len(memory), []).append(memory)
