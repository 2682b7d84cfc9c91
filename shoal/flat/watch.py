"""Notices what user code writes into a tensor.

The version counter of a tensor misses writes through `.data`, NumPy and DLPack, so the values themselves are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 8  # bytes; sums of 64-bit words take a fraction of the time that sums of 16-bit elements take
ROWS, COLUMNS = 31, 1021
"""Primes, so that rows of a matrix that change places do not stay in their columns; and odd, because the top bit of a
word, the sign of a number, is lost in a sum with an even number of changes."""

SPARSE = 256, 64  # the columns, and how many of them a sparse watch reads
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Watch:
    """Notices whether a tensor holds other values than at the last `keep`.

    It keeps a copy of a small tensor. The 64-bit words of a large one lie one after the other in tables of 31 rows and
    1,021 columns, and it keeps the sum of each column, which takes 1/31 of the tensor's memory. So elements that change
    places are noticed, too. It is no protection against somebody who wants a tensor with the same sums.

    The tensors are 1-D and contiguous, always of the same length, dtype and device. Everything is computed on that
    device.

    Args:
        sparse: of a large tensor on the host, read only one quarter: 512 bytes of every 2 KiB. A write that covers less
            may not be noticed.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        self._sparse = sparse
        self._kept: Tensor | None = None
        self._tensor: Tensor | None = None
        self._words = self._rest = torch.empty(0, device="cpu")

    def keep(self, tensor: Tensor) -> None:
        """The values that the tensor has now are the ones to compare with."""
        self._kept = self._sums(tensor, copy=True)

    def forget(self) -> None:
        """Until the next `keep`, every tensor counts as written."""
        self._kept = None

    def is_written(self, tensor: Tensor) -> bool | Tensor:
        """Whether the tensor holds other values; for a tensor on a device a bool tensor there, for which nobody has
        waited."""
        if self._kept is None:
            return True
        sums = self._sums(tensor, copy=False)
        if sums.shape != self._kept.shape:  # it moved to memory with another alignment
            return True
        return not torch.equal(sums, self._kept) if sums.device.type == "cpu" else (sums != self._kept).any()

    def _sums(self, tensor: Tensor, *, copy: bool) -> Tensor:
        if tensor is not self._tensor:
            size, offset = tensor.element_size(), tensor.storage_offset()
            whole = 0 if offset * size % WORD else tensor.numel() * size // WORD * WORD // size
            self._words = tensor[:whole].view(torch.int64) if whole else tensor.view(INTEGERS.get(size, torch.int64))
            self._rest = tensor[whole:].view(torch.uint8) if whole else self._words[:0]
            self._tensor = tensor
        words, rest = self._words, self._rest
        columns, read = SPARSE if self._sparse and words.device.type == "cpu" else (COLUMNS, COLUMNS)
        tables = len(words) // (ROWS * columns)
        if not tables and not len(rest):
            return words.clone() if copy else words
        whole = tables * ROWS * columns
        table = words[:whole].view(tables, ROWS, columns)[..., :read]
        return torch.cat([table.sum(1, dtype=torch.int64).view(-1), words[whole:].long(), rest.long()])


class MemoryWatch:
    """Notices whether somebody has written into flat memory since the last `keep`.

    Args:
        sparse: see `Watch`.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        self._sparse = sparse
        self._of: list[Watch] = []

    @property
    def is_on(self) -> bool:
        """Whether there are values to compare with."""
        return bool(self._of)

    def keep(self, flat: Sequence[Tensor]) -> None:
        """The values that these buffers have now are the ones to compare with."""
        if len(self._of) != len(flat):
            self._of = [Watch(sparse=self._sparse) for _ in flat]
        for watch, buffer in zip(self._of, flat, strict=True):
            watch.keep(buffer)

    def forget(self) -> None:
        """Until the next `keep`, the memory counts as written."""
        self._of = []

    def is_written(self, flat: Sequence[Tensor]) -> bool:
        """Whether a buffer holds other values. Waits for the devices."""
        if not self._of:
            return True
        found = [watch.is_written(buffer) for watch, buffer in zip(self._of, flat, strict=True)]
        return any(bool(answer) for answer in found)
