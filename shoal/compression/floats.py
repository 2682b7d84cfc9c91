"""The common base of the lossy codecs for real floats."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.codec import Codec, elements_of, payload_of

REAL_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

LARGEST: Final = 2.0**126
"""A larger absolute value counts as overflow, like infinity. Sums and differences of two smaller ones are finite."""


class FloatCodec(Codec):
    """A lossy codec of real floats.

    A chunk of another dtype (integers, booleans, complex) is sent unchanged, as by `NoCompression`. So is a chunk whose
    payload would not be smaller: a codebook is larger than the smallest chunks. Values are converted to float32 before
    compression and decoded to float32, whatever the dtype.

    The bytes are the same on every machine and with any number of threads. They come from operations whose results do
    not depend on the order of operands or on the width of vector instructions (products and differences rounded once,
    extremes, sums of integers). So digests of payloads can be compared.

    A subclass implements the methods below.
    """

    __slots__ = ()

    lossy: ClassVar[bool] = True

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The smaller of the compressed size and the plain size; the plain size if the elements are no real floats."""
        plain = numel * dtype.itemsize
        return min(plain, self._compressed_nbytes(numel)) if dtype in REAL_FLOATS else plain

    def _is_compressed(self, numel: int, dtype: torch.dtype) -> bool:
        return dtype in REAL_FLOATS and self._compressed_nbytes(numel) < numel * dtype.itemsize

    def _encode(self, chunk: Tensor) -> memoryview:
        if not self._is_compressed(chunk.numel(), chunk.dtype):
            return payload_of(chunk)
        payload = torch.empty(self._compressed_nbytes(chunk.numel()), dtype=torch.uint8, device="cpu")
        self._compress(chunk.detach().float(), payload)
        return payload_of(payload)

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        if not self._is_compressed(numel, dtype):
            return elements_of(payload, dtype)
        return self._extract(payload, numel)

    @abstractmethod
    def _compressed_nbytes(self, numel: int) -> int:
        """The size in bytes of the compressed payload of this many elements."""

    @abstractmethod
    def _compress(self, values: Tensor, payload: Tensor) -> None:
        """Writes the payload, uint8, of these float32 values, at least one. Only reads the values."""

    @abstractmethod
    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        """The float32 values of a compressed payload of the right size."""
