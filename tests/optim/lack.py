"""A lack of memory, made in this thread: one of the large allocations fails."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.flat import allocation, modes

LARGE_BYTES = 256
TORCH = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


class Lack(TorchDispatchMode):
    """Within, the `nth` allocation of this thread fails as torch's and the kernel's do: of tensors of at least
    `LARGE_BYTES`, and of memory that Shoal maps.

    Attributes:
        made: how many allocations there were.
    """

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._nth, self.made = nth, 0
        self._patch = pytest.MonkeyPatch()

    def _count(self, error: Exception) -> None:
        self.made += 1
        if self.made == self._nth:
            raise error

    def __enter__(self) -> Lack:
        mapped, me = allocation._mapped, threading.get_ident()

        def count(nbytes: int) -> Any:
            if threading.get_ident() == me:
                self._count(OSError(errno.ENOMEM, "Cannot allocate memory"))
            return mapped(nbytes)

        self._patch.setattr(modes, "count_dispatch_modes", lambda: 0)  # Shoal leaves users' modes, and not this one
        self._patch.setattr(allocation, "_mapped", count)
        self._patch.setattr(allocation, "_LARGE_BYTES", LARGE_BYTES)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {id_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in (each for each in tree_leaves(made) if isinstance(each, Tensor)):
            if tensor.untyped_storage().nbytes() >= LARGE_BYTES and id_of(tensor) not in known:
                self._count(RuntimeError(f"{TORCH} {tensor.nbytes} bytes. Error code 12 (Cannot allocate memory)"))
        return made


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
