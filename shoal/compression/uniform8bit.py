"""8 bits per element, with even steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.blocks import BlockCodec
from shoal.compression.floats import LARGEST

_SMALLEST_STEP: Final = torch.finfo(torch.float32).tiny
_MIDDLE: Final = 128  # codes are stored as int8, to which torch converts 5 times as fast as to uint8


@dataclass(frozen=True, slots=True)
class Uniform8BitQuantization(BlockCodec):
    """Sends real floats as multiples of a step: 1 byte per element and 8 bytes per block of 2048 elements.

    The step is 1/254 of the block's range, so the error of an element is at most 1/508 of the difference between the
    largest and the smallest value of its block, plus 2**-21 of the largest absolute value, plus 2**-118. No value is
    clipped. Zeros and constant blocks are decoded exactly.
    """

    name: ClassVar[str] = "uniform_8bit"
    block: ClassVar[int] = 2048
    statistics: ClassVar[int] = 2  # the value of code 0, step
    code: ClassVar[torch.dtype] = torch.int8

    def _compress_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        valid = (low >= -LARGEST) & (high <= LARGEST)
        if not valid.all():
            values = torch.where(valid, values, 0)  # NaN converts to no integer
        step = ((high - low) / 254).where(valid, 0)
        step.masked_fill_(step < _SMALLEST_STEP, 0)
        inverse = (1 / step).masked_fill_(step == 0, 0)
        # The value of the lowest code: the lowest value, or the multiple of the step below it if zero is in the range,
        # so that zero has a code.
        has_zero = (low <= 0) & (high >= 0)
        steps_below = (low * inverse).floor_()
        origin = torch.where(has_zero, steps_below * step, low).where(valid, 0)
        middle = torch.where(has_zero, (steps_below + _MIDDLE) * step, low + _MIDDLE * step)
        statistics[:, :1] = middle.where(valid, torch.nan)
        statistics[:, 1:] = step
        codes.copy_((values - origin).mul_(inverse).sub_(_MIDDLE).round_())

    def _extract_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        middle, step = statistics[:, :1], statistics[:, 1:]
        values.copy_(codes).mul_(step).add_(middle)
