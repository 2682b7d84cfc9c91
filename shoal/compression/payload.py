"""Chunks as bytes and bytes as chunks, shared where the memory allows it.

``shoal.flat`` has its own, stricter bridge for memory that it owns. Here the bytes come from the network: they start at
any address, may be read-only, and hold whatever the sender liked.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def payload_of(chunk: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, shared and kept alive by the memoryview."""
    nbytes = chunk.numel() * chunk.element_size()
    if nbytes == 0:  # a memoryview of zero ctypes elements cannot be cast to bytes
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(chunk.data_ptr())
    array.owner = chunk.untyped_storage()  # type: ignore[attr-defined]  # the memoryview holds the array, that the memory
    return memoryview(array).cast("B")


def elements_of(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """The elements in a payload as a 1-D tensor: a view of it where that is possible, else a copy.

    Copied are a payload that is not aligned to the element's size (loads from such addresses are undefined in
    C++), one that is read-only (torch has no read-only tensors), and ``torch.bool``, where any byte but 0 counts as
    true (what torch computes with bytes other than 0 and 1 is undefined).
    """
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    raw = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
    if dtype is torch.bool:
        return raw.ne(0)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
