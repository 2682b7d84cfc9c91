"""8 bits per element, with finer steps for small values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.blocks import BlockCodec
from shoal.compression.floats import LARGEST

_DECADES: Final = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_KEY_RANGE: Final = 2.0**15  # values are scaled up to this and looked up as float16, far from where float16 is denormal


@functools.cache
def dynamic_values() -> Tensor:
    """The 256 values between -1 and 1 that the codes represent, ascending, as float32.

    They are the dynamic tree of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (ICLR 2016), section
    3: for each sign, 2**i evenly spaced values in decade i of 7; and 0 and 1.
    """
    positive = [
        decade * (0.1 + 0.9 * (number + 0.5) / (1 << i))
        for i, decade in enumerate(_DECADES)
        for number in range(1 << i)
    ]
    return torch.tensor(
        sorted([*positive, *(-value for value in positive), 0.0, 1.0]), dtype=torch.float32, device="cpu"
    )


@functools.cache
def _codes_by_float16() -> Tensor:
    """The code of the nearest value for each of the 65536 float16, indexed by its bits."""
    values = dynamic_values().double()
    borders = (values[1:] + values[:-1]) / 2
    float16 = torch.arange(1 << 16, device="cpu").to(torch.int16).view(torch.float16)
    return torch.bucketize(float16.double().nan_to_num_(0) / _KEY_RANGE, borders).to(torch.uint8)


@functools.cache
def _pairs_of_values() -> Tensor:
    """The two float32 that each two bytes of codes encode, as one int64: one lookup decodes two elements."""
    values = dynamic_values()
    return torch.stack([values.repeat(256), values.repeat_interleave(256)], dim=1).view(torch.int64).view(-1)


@dataclass(frozen=True, slots=True)
class BlockwiseQuantization(BlockCodec):
    """Sends real floats as fractions of the block's largest absolute value: the nearest of 256 fixed fractions, finer
    for small values.

    The payload takes 1 byte per element and 4 bytes per block of 1024 elements. For values that span decades, such as
    statistics of optimizers.

    After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), with smaller blocks and without a
    copy of the fractions in the payload.

    Let `a` be the largest absolute value of the block. The error of an element x is at most 0.0074 a. For |x| below 0.1
    a, 0.01 a and 0.001 a it is at most 0.0015 a, 0.0003 a and 0.00006 a. |x| below 2.7e-7 a is decoded as 0, and so is
    a block without a value beyond 2**-100. Zero and `a` are decoded exactly, `-a` as -0.993 a.
    """

    name: ClassVar[str] = "blockwise_8bit"
    block: ClassVar[int] = 1024
    statistics: ClassVar[int] = 1  # the largest absolute value
    code: ClassVar[torch.dtype] = torch.uint8

    def _compress_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        largest = torch.maximum(-values.amin(1, keepdim=True), values.amax(1, keepdim=True))
        inverse = torch.where(largest >= 2.0**-100, _KEY_RANGE / largest, 0)
        scratch = values * inverse
        keys = scratch.view(torch.int32).copy_(scratch.to(torch.float16).view(torch.uint16))
        torch.index_select(_codes_by_float16(), 0, keys.view(-1), out=codes.view(-1))
        statistics.copy_(largest.masked_fill_(~(largest <= LARGEST), torch.nan))

    def _extract_blocks(self, values: Tensor, statistics: Tensor, codes: Tensor) -> None:
        flat, codes = values.view(-1), codes.view(-1)
        if codes.data_ptr() % 2:
            codes = codes.clone()
        even = len(flat) // 2 * 2
        pairs = codes[:even].view(torch.uint16).int()
        torch.index_select(_pairs_of_values(), 0, pairs, out=flat[:even].view(torch.int64))
        if even < len(flat):
            flat[even:] = dynamic_values()[codes[even:].long()]
        values.mul_(statistics)
