"""Half-precision floats of what is left after the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.blocks import BlockCodec

_SMALLEST_MEAN: Final = 2.0**-100
_GRID: Final = 4096.0  # times 2048 elements: a sum of integers below 2**24, exact in float32 in any order
_EXPONENT: Final = 0xFF << 23  # of the bits of a float32; 1 << 23 is a factor of two
_SMALLEST_EXPONENT: Final = 15 << 23
_SCALE: Final = 13 << 23  # the scale is 2**13 below the largest absolute value, and the distances at most 2**15 scales
_RECIPROCAL: Final = (254 << 23) + _SCALE


@dataclass(frozen=True, slots=True)
class ScaledFloat16Compression(BlockCodec):
    """Sends real floats as float16 after taking away their mean and scaling them into float16's range: 2 bytes an
    element and 8 a block of 2048. For values that are far from 0 and near each other, or too small or too large for
    float16. Elements of float16 and bfloat16 are sent as they are: they are no larger.

    The mean is that of a block, its values rounded to 1/4096 of the largest absolute one, or of 2**-100 if that is
    larger; the scale is a power of two, so it adds no error. The error of an element is at most 2**-11 of its distance
    from that mean, plus 2**-22 of the largest absolute value of its block, plus 2**-149. A constant block of more than
    2**-100 comes back exactly. Values beyond ±2**126 may come back infinite or NaN; one that is not finite makes its
    block so.
    """

    name: ClassVar[str] = "scaled_float16"
    block: ClassVar[int] = 2048
    statistics: ClassVar[int] = 2  # mean, scale
    code: ClassVar[torch.dtype] = torch.float16

    def _compress_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        largest = torch.maximum(-values.amin(1, keepdim=True), values.amax(1, keepdim=True))
        grid = largest.clamp(min=_SMALLEST_MEAN).div_(_GRID)
        scratch = values * (1 / grid)
        mean = scratch.round_().sum(1, keepdim=True).div_(values.shape[1]).mul_(grid)
        exponent = largest.view(torch.int32).bitwise_and_(_EXPONENT).clamp_(min=_SMALLEST_EXPONENT)
        statistics[:, :1] = mean
        statistics[:, 1:] = (exponent - _SCALE).view(torch.float32)
        codes.copy_(torch.sub(values, mean, out=scratch).mul_((_RECIPROCAL - exponent).view(torch.float32)))

    def _extract_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        mean, scale = statistics[:, :1], statistics[:, 1:]
        values.copy_(codes).mul_(scale).add_(mean)
