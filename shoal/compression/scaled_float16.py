"""Half-precision floats of the differences from the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.blocks import BlockCodec

# number of elements of which the mean is taken; times 2**14, the largest in scales, it is exact in float32
_SAMPLES: Final = 256
# the exponent bits of a float32; without the other bits it is a power of two, or infinity
_EXPONENT: Final = 0xFF << 23
_SCALE: Final = 2.0**-13  # times the largest absolute value, so that distances are at most 2**15 scales
_SMALLEST_SCALE: Final = 2.0**-125


@dataclass(frozen=True, slots=True)
class ScaledFloat16Compression(BlockCodec):
    """Subtracts the mean from real floats, scales them into float16's range, and sends them as float16.

    The payload takes 2 bytes per element and 8 bytes per block of 2048 elements. For values that are far from 0 and
    near each other, or too small or too large for float16. Elements of float16 and bfloat16 are sent unchanged, because
    they are no larger.

    The mean is taken of 256 elements of a block, the first 128 of each half, and rounded to the scale. (The mean of all
    elements would take a quarter of the time of encoding, and reduce the mean square error of evenly mixed values by
    0.3%.) The scale is a power of two, so it adds no error. It is 2**-14 to 2**-13 of the largest absolute value, but
    at least 2**-125. The error of an element is at most 2**-11 of its distance from that mean, plus 2**-22 of the
    largest absolute value of its block, plus 2**-149. A constant block of more than 2**-100 is decoded exactly. Values
    beyond ±2**126 may be decoded as infinite or NaN. A value that is not finite makes its whole block infinite or NaN.
    """

    name: ClassVar[str] = "scaled_float16"
    block: ClassVar[int] = 2048
    statistics: ClassVar[int] = 2  # mean, scale
    code: ClassVar[torch.dtype] = torch.float16

    def _compress_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        scale = torch.maximum(values.amin(1, keepdim=True).neg_(), values.amax(1, keepdim=True))
        scale.mul_(_SCALE).clamp_(min=_SMALLEST_SCALE).view(torch.int32).bitwise_and_(_EXPONENT)
        inverse = scale.reciprocal()  # exact; 0 if the scale is infinite, which means that a value is infinite or NaN
        mean = _mean(_sample(values) * inverse).mul_(scale)
        torch.cat((mean, scale), 1, out=statistics)
        codes.copy_(torch.sub(values, mean).mul_(inverse))

    def _extract_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        mean, scale = statistics[:, :1], statistics[:, 1:]
        values.copy_(codes).mul_(scale).add_(mean)


def _sample(values: Tensor) -> Tensor:
    """At most _SAMPLES elements of each row; if the row is a whole block, half of them from each half."""
    rows, numel = values.shape
    if numel == ScaledFloat16Compression.block:
        return values.view(rows, 2, -1)[:, :, : _SAMPLES // 2].reshape(rows, -1)
    return values[:, :: -(-numel // _SAMPLES)]


def _mean(samples: Tensor) -> Tensor:
    """The mean of each row. The samples are rounded to integers, whose sum is exact and so the same in any order."""
    return samples.round_().sum(1, keepdim=True).div_(samples.shape[1])
