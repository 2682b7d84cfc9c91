"""The bridges between views of one memory: as a memoryview, as a tensor, as a storage of its own. Nothing is copied."""

from __future__ import annotations

import ctypes
import mmap
import queue
import weakref
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

_LARGE_BYTES: Final = 4 << 20
_MAX_SPARES: Final = 2  # as many as a donor holds states


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype as a writable memoryview of bytes (format ``"B"``).

    Nothing is copied: what is written to one is seen by the other. The memoryview and every slice of it keep the
    tensor's memory alive.

    Raises:
        ValueError: if the tensor is not on the CPU or not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"only contiguous CPU memory has bytes, got a tensor of shape {tuple(tensor.shape)}, "
            f"stride {tensor.stride()} on {tensor.device}: copy it to the CPU first"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:  # a memoryview of zero ctypes elements cannot be cast to bytes
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    # A memoryview holds the object it was made of, and that object must hold the memory: the storage, not the tensor,
    # which `tensor.data = other` can give other memory.
    array.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def tensor_from(data: memoryview, dtype: torch.dtype) -> Tensor:
    """The bytes of ``data`` as a 1-D CPU tensor of ``dtype``: the inverse of :func:`bytes_of`.

    Nothing is copied: what is written to one is seen by the other. The tensor keeps ``data`` alive.

    Raises:
        ValueError: if ``data`` is read-only, is not a whole number of elements, or starts at an address that is not
            aligned for ``dtype`` (C++ code may assume that it is, whatever the processor allows).
    """
    itemsize = dtype.itemsize
    if data.nbytes % itemsize:
        raise ValueError(f"{data.nbytes} bytes are not a whole number of {dtype} elements of {itemsize} bytes")
    if data.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if data.readonly:
        raise ValueError("a tensor cannot share read-only memory: copy it into a bytearray first")
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % itemsize:
        raise ValueError(f"memory at {raw.data_ptr():#x} is not aligned for {dtype}, which needs {itemsize} bytes")
    return raw.view(dtype)


def zeros(numel: int, dtype: torch.dtype, recycled: bool = False) -> Tensor:
    """A 1-D CPU tensor of zeros, with memory as that of `empty`.

    Args:
        recycled: if it is large, its memory may be that of another recycled one to which nobody refers any more, and
            becomes a spare itself (see `forget_spares`): for copies that are made one after the other. On a virtual
            machine that gives free pages back to its host, fresh memory costs 1 s per 400 MB.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    spare = _spare(nbytes) if recycled else None
    memory = spare or _mapped(nbytes)
    lent = (ctypes.c_ubyte * nbytes).from_buffer(memory)
    if recycled:
        weakref.finalize(lent, _let_go, memory, _spares).atexit = False
    tensor = torch.frombuffer(lent, dtype=dtype)
    return tensor.zero_() if spare else tensor


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D CPU tensor with anything in it. If it is large, its memory is in huge pages, if the kernel has them: 400 MB
    are filled in 0.065 s instead of 0.2."""
    nbytes = numel * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(_mapped(nbytes), dtype=dtype)


def _mapped(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel, or a system, without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_spares: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()


def forget_spares() -> None:
    """The kernel gets back what is kept to be used again: at once what is spare now, the rest when nobody refers to it
    any more."""
    global _spares
    forgotten, _spares = _spares, queue.SimpleQueue()
    _shorten(forgotten, 0)


def _let_go(memory: mmap.mmap, spares: queue.SimpleQueue[mmap.mmap]) -> None:
    """Called in any thread, in the middle of anything: so without a lock."""
    spares.put(memory)
    _shorten(spares, _MAX_SPARES if spares is _spares else 0)


def _shorten(spares: queue.SimpleQueue[mmap.mmap], length: int) -> None:
    with suppress(queue.Empty):  # another thread was quicker
        while spares.qsize() > length:
            spares.get_nowait()


def _spare(nbytes: int) -> mmap.mmap | None:
    """Memory of that size that was let go of."""
    spares = _spares
    for _ in range(spares.qsize()):
        with suppress(queue.Empty):  # another thread was quicker
            memory = spares.get_nowait()
            if len(memory) == nbytes:
                return memory
            spares.put(memory)
    return None


def own_storage(part: Tensor) -> Tensor:
    """The memory of a contiguous 1-D tensor, in general a slice, as a 1-D tensor that has a storage of its own.

    Who compares storages takes slices of a tensor for one tensor: safetensors saves one of them, `torch.save` saves
    the whole memory with each. So tensors that users meet are made of these. What is written to one is seen by the
    other, but each has a version counter of its own. It keeps the memory alive. A tensor on the meta device has no
    memory, and stays as it is.
    """
    if part.is_meta:
        return part
    if not part.numel():
        return torch.empty_like(part)
    return torch.from_dlpack(part.detach())
