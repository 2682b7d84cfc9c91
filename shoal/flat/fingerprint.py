"""Fingerprints of flat memory: whether somebody has written to it, in whatever way.

Writes through `.data`, numpy and DLPack raise no count (`_version`), and change no address. So the bits are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

SMALL_BYTES = 1 << 19
"""On the host, of a larger buffer only `ROW` words of every `PERIOD` are read, and the sums of these rows are weighted:
0.3 ms for 25 MB, where all words would take 4 ms. So every write that covers 2 KiB in one piece is seen there, and a
smaller one may not be. What depends on a fingerprint on the host is a warning, and nothing else."""

ROW, PERIOD = 64, 256  # words of 8 bytes

HOST_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 20  # the numbers that are weighted at a time

_TURN = 6364136223846793005  # odd, so that the block before is not lost


def fingerprint(flat: Sequence[Tensor]) -> list[Tensor]:
    """One number for each buffer of a `FlatBuffer`, on the device of that buffer. Does not wait for a device.

    Two contents of a buffer have the same number with a probability of about 2**-32; see `SMALL_BYTES` for the
    exception.
    """
    return [_of_host(buffer) if buffer.device.type == "cpu" else _of_device(buffer) for buffer in flat]


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two fingerprints are equal; False if one is empty, because it is not known. Waits for the devices."""
    if not some or len(some) != len(others):
        return False
    return all(bool((one == other).item()) for one, other in zip(some, others, strict=True))


def _of_host(buffer: Tensor) -> Tensor:
    if buffer.nbytes <= SMALL_BYTES:
        return _sum(_halves(buffer).to(torch.int64), HOST_BLOCK)
    words = buffer.detach().view(torch.int64)
    whole = words.numel() // PERIOD * PERIOD
    rows = words[:whole].view(-1, PERIOD // ROW, ROW)[:, 0].sum(1)
    return _sum(torch.cat([rows, words[whole:]]), HOST_BLOCK)


def _of_device(buffer: Tensor) -> Tensor:
    return _sum(_halves(buffer), DEVICE_BLOCK)


def _halves(buffer: Tensor) -> Tensor:
    """The halves of words: a changed sign must not be the top bit of the sum, which any other such bit would undo."""
    return buffer.detach().view(torch.int32)


def _sum(numbers: Tensor, size: int) -> Tensor:
    """The weighted sum of integers, modulo 2**64."""
    weights, found = _weights(numbers.device, size), torch.zeros((), dtype=torch.int64, device=numbers.device)
    for block in torch.split(numbers, size):
        found = found * _TURN + (weights[: block.numel()] * block).sum()
    return found


@cache
def _weights(device: torch.device, count: int) -> Tensor:
    """Odd random numbers, the same in every process."""
    random = torch.Generator().manual_seed(37)
    made = torch.randint(-(1 << 62), 1 << 62, (count,), generator=random, dtype=torch.int64, device="cpu")
    return (made * 2 + 1).to(device)
