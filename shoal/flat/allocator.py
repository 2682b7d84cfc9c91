"""Keeps the C allocator from handing the memory of gradients back to the kernel in each step."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Final

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT: Final = 32 << 20
"""Bytes. glibc takes no more, and gets here by itself once a block of this size has been freed."""
MOST_KEPT: Final = 2**31 - 1
"""Bytes: mallopt takes an int."""


def keep_freed_memory(nbytes: int) -> None:
    """Have glibc keep up to ``nbytes`` of freed memory for the next blocks of up to `LARGEST_KEPT` bytes.

    Autograd allocates every gradient anew. By default glibc gives their memory back to the kernel in each step, and
    every page of the next gradients costs a fault of 2 to 4 µs: a fifth of the CPU time of a step (5 Linear(2000, 2000)
    on 2 ranks: 125 against 97 ms per rank). What is kept may be more than was ever in use at a time, as an aligned
    block does not fit into the hole that one of its size has left: a sixth more with 20 Linear(2000, 2000). Where there
    is no glibc, or its environment variables say otherwise, nothing is changed.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        log.debug("no mallopt here: freed gradients go back to the kernel")
        return
    mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(_M_TRIM_THRESHOLD, min(nbytes, MOST_KEPT))
