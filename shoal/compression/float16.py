"""Half-precision floats on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.codec import Codec, elements_of, payload_of

_COMPRESSED: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MAX: Final = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Float16Compression(Codec):
    """Sends float64, float32, bfloat16 and float16 as float16: 2 bytes per element, rounded to nearest.

    Values beyond ±65504, infinite ones included, become ±65504, so that one overflow does not make an average infinite.
    NaN stays NaN. The error of other values is at most 2**-11 of the value, or at most 2**-25 for values below 2**-14,
    where float16 is denormal. Elements of other dtypes (integers, booleans, complex) are sent unchanged, as by
    `NoCompression`.

    The payload of a compressed chunk has memory of its own. Decoding gives float16 without a copy. Adding it to
    float32, or copying it there, converts on the way; this takes no longer than converting first, and often half as
    long. Only a bfloat16 chunk is decoded to float32, because torch's direct conversion from float16 to bfloat16 takes
    4 times as long as the conversion through float32.
    """

    name: ClassVar[str] = "float16"
    lossy: ClassVar[bool] = True

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """2 bytes per element, or the element's size for a dtype that is sent unchanged."""
        return numel * (2 if dtype in _COMPRESSED else dtype.itemsize)

    def _encode(self, chunk: Tensor) -> memoryview:
        if chunk.dtype not in _COMPRESSED:
            return payload_of(chunk)
        if chunk.dtype is torch.bfloat16:
            chunk = chunk.float()  # exact, and faster than clamping and converting bfloat16 itself
        halves = chunk.detach().to(torch.float16, copy=True)
        # Clamping is rarely needed. A finite sum has finite terms; a sum that is not finite may only be large. (Adding
        # up float16 takes half as long as clamping float32, and a third as long as finding the extremes of float16.)
        if not math.isfinite(halves.sum().item()):
            halves.copy_(chunk.clamp(-_MAX, _MAX))
        return payload_of(halves)

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in _COMPRESSED:
            return elements_of(payload, dtype)
        halves = elements_of(payload, torch.float16)
        return halves.float() if dtype is torch.bfloat16 else halves
