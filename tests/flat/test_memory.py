"""The same memory as bytes and as a tensor."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from shoal.flat import bytes_of, tensor_from
from shoal.flat.allocation import empty, forget_spares, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.bool])
@pytest.mark.parametrize("numel", [0, 1, 5])
def test_tensor_and_bytes_are_one_memory(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.arange(numel).to(dtype)
    again = tensor_from(bytes_of(tensor), dtype)
    assert torch.equal(again, tensor)
    assert again.data_ptr() == tensor.data_ptr()
    tensor.zero_()
    assert not again.any()


def test_bytes_outlive_the_tensor_and_its_new_data() -> None:
    tensor = torch.full((1 << 16,), 3, dtype=torch.uint8)
    data = bytes_of(tensor)
    tensor.data = torch.zeros(1)
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]  # would get the memory, were it free
    assert data == b"\x03" * (1 << 16)
    del others


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4).t()[1:], torch.zeros(2, device="meta")])
def test_memory_without_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous CPU memory"):
        bytes_of(tensor)


def test_memory_that_no_tensor_can_share_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes are not a whole number"):
        tensor_from(memoryview(bytearray(5)), torch.float32)
    with pytest.raises(ValueError, match="read-only"):
        tensor_from(memoryview(bytes(4)), torch.float32)
    with pytest.raises(ValueError, match="not aligned"):
        tensor_from(memoryview(bytearray(5))[1:], torch.float32)


def test_large_memory_is_zeros_and_private_to_the_process():
    large = zeros(2 << 20, torch.float32)
    assert not large.any()
    child = os.fork()
    if child == 0:
        bytes_of(large)[:4] = b"fork"
        os._exit(0)
    os.waitpid(child, 0)
    assert not large.any()
    large.fill_(1.0)
    assert zeros(3, torch.int16).tolist() == [0, 0, 0]


def test_recycled_memory_is_used_again_when_nobody_refers_to_it() -> None:
    numel = (4 << 20) + 3
    first = zeros(numel, torch.uint8, recycled=True)
    address, view = first.data_ptr(), bytes_of(first)[7:9]
    first.fill_(1)
    del first
    assert zeros(numel, torch.uint8, recycled=True).data_ptr() != address, "a view of it is left"
    del view
    again = zeros(numel, torch.uint8, recycled=True)
    assert not again.any()
    del again
    others = [zeros(numel, torch.uint8, recycled=True) for _ in range(4)]
    assert address in [other.data_ptr() for other in others]
    assert len({other.data_ptr() for other in others}) == 4
    forget_spares()


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc how much memory is resident")
def test_large_memory_goes_back_to_the_kernel() -> None:
    numel = 64 << 20
    before = resident()
    late = zeros(numel, torch.uint8, recycled=True).fill_(1)
    zeros(numel, torch.uint8, recycled=True).fill_(1)
    zeros(numel, torch.uint8).fill_(1)
    empty(numel, torch.uint8).fill_(1)
    assert resident() - before > 1.5 * numel, "what is recycled is not kept"
    forget_spares()
    assert resident() - before < 1.5 * numel
    del late
    assert resident() - before < 0.5 * numel
