"""The codec that sends elements unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.codec import Codec, elements_of, payload_of


@dataclass(frozen=True, slots=True)
class NoCompression(Codec):
    """Sends elements of any dtype as they are in memory (little-endian, as on every platform of torch).

    Encoding does not copy: the payload is the chunk's own memory. Decoding gives a view of the payload. It copies only
    booleans, and payloads that are read-only or not aligned to the element's size.
    """

    name: ClassVar[str] = "none"
    lossy: ClassVar[bool] = False

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """``numel`` times the size of an element."""
        return numel * dtype.itemsize

    def _encode(self, chunk: Tensor) -> memoryview:
        return payload_of(chunk)

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        return elements_of(payload, dtype)
