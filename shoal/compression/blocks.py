"""Codecs that divide a chunk into blocks, each with statistics of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.codec import elements_of
from shoal.compression.floats import FloatCodec


class BlockCodec(FloatCodec):
    """A codec that encodes blocks of consecutive elements, each block by itself.

    A chunk may hold tensors of different scales, and a tensor may hold rows of different scales. With blocks, large
    values cost precision only near them. A value that is not finite, or beyond ±2**126, makes its whole block NaN when
    the block is decoded, so that the reducer of the chunk notices it.

    Payload: the statistics of all blocks, float32, then the codes of all elements. The last block may be shorter.
    """

    __slots__ = ()

    block: ClassVar[int]
    """The number of elements of a block."""

    statistics: ClassVar[int]
    """The number of float32 statistics of a block."""

    code: ClassVar[torch.dtype]
    """The dtype of an element's code."""

    def _compressed_nbytes(self, numel: int) -> int:
        return self._header_nbytes(numel) + numel * self.code.itemsize

    def _header_nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * self.statistics * 4

    def _compress(self, values: Tensor, payload: Tensor) -> None:
        header = self._header_nbytes(len(values))
        statistics, codes = payload[:header].view(torch.float32), payload[header:].view(self.code)
        for part in self._parts(values, statistics, codes):
            self._compress_blocks(*part)

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        header = self._header_nbytes(numel)
        statistics, codes = elements_of(payload[:header], torch.float32), elements_of(payload[header:], self.code)
        values = torch.empty(numel, dtype=torch.float32, device="cpu")
        for part in self._parts(values, statistics, codes):
            self._extract_blocks(*part)
        return values

    def _parts(self, values: Tensor, statistics: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All whole blocks as the rows of matrices, then the shorter block, if there is one."""
        whole = len(values) // self.block
        stop = whole * self.block
        statistics = statistics.view(-1, self.statistics)
        if whole:
            yield values[:stop].view(whole, -1), statistics[:whole], codes[:stop].view(whole, -1)
        if stop < len(values):
            yield values[stop:].view(1, -1), statistics[whole:], codes[stop:].view(1, -1)

    @abstractmethod
    def _compress_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        """Writes the statistics and codes of blocks, which are the rows of `values`. Only reads `values`."""

    @abstractmethod
    def _extract_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        """Writes the values of blocks."""
