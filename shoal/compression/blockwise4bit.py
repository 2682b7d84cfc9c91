"""4 bits per element, with finer steps for small values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.codec import elements_of
from shoal.compression.floats import LARGEST, FloatCodec

_VALUES: Final = (
    -0.836, -0.624, -0.464, -0.338, -0.233, -0.1445, -0.068, 0.0,
    0.063, 0.1335, 0.215, 0.31, 0.423, 0.562, 0.7435, 1.0,
)  # fmt: skip
_STEPS: Final = 127  # quotients are rounded towards 0 to 127ths for the lookup, so a pair of them has 16 bits
_BLOCK: Final = 128


@functools.cache
def _codes_by_pair() -> Tensor:
    """The byte of codes for each pair of int8. The code of the first is in the lower half."""
    steps = torch.arange(1 << 8, device="cpu").to(torch.uint8).view(torch.int8).double()
    quotients = (steps + steps.sign() / 2) / _STEPS  # the middle of the quotients that are rounded to each
    values = torch.tensor(_VALUES, dtype=torch.float64, device="cpu")
    codes = torch.bucketize(quotients, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return (codes.repeat_interleave(256) << 4) | codes.repeat(256)


@functools.cache
def _pairs_of_values() -> Tensor:
    """The two float32 that each byte of codes encodes, as one int64."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device="cpu")
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.int64).view(-1)


@dataclass(frozen=True, slots=True)
class Blockwise4Bit(FloatCodec):
    """Sends real floats as fractions of the block's largest value: the nearest of 16 fixed fractions, finer for small
    values.

    The payload takes half a byte per element and 2 bytes per block of 128 elements: 1/7.76 of float32.

    For drifts and gradients, with error feedback (`error_feedback` of the averagers), which sends the lost rest in
    later rounds.

    Blocks with one scale each are those of Dettmers et al., "QLoRA" (arXiv 2305.14314). The scale is the value with the
    largest absolute value, as a bfloat16 with its sign (GGML's Q4_0 has a signed scale, too). So only one end of the
    fractions has to be exact. The fractions are the fixed point of Lloyd's algorithm ("Least squares quantization in
    PCM", 1982) for blocks of Laplace distributed values. Mean square error over the values' mean square, 2**20 values:

    | values | these | QLoRA's NF4 | E3M0 (signed powers of 2) |
    |---|---:|---:|---:|
    | normal | 0.0087 | 0.0091 | 0.037 |
    | Laplace | 0.0111 | 0.0129 | 0.034 |
    | Student's t, 3 degrees of freedom | 0.0168 | 0.0223 | 0.027 |

    Let `a` be the largest absolute value of the block. The error of an element is at most 0.17 a, and at most 0.042 a
    if the element is below 0.1 a. Zero is decoded exactly. `a` may be decoded up to 2**-7 a smaller, and no value
    becomes larger than `a`. A block without a value beyond 2**-100 is decoded as zeros. A value that is not finite, or
    beyond ±2**126, makes its whole block NaN when it is decoded.

    Payload: the scales of all blocks, bfloat16, then the codes, two in a byte. The last block may be shorter.
    """

    name: ClassVar[str] = "blockwise_4bit"
    block: ClassVar[int] = _BLOCK

    def _compressed_nbytes(self, numel: int) -> int:
        return self._header_nbytes(numel) + -(-numel // 2)

    def _header_nbytes(self, numel: int) -> int:
        return -(-numel // _BLOCK) * 2

    def _compress(self, values: Tensor, payload: Tensor) -> None:
        header, numel = self._header_nbytes(len(values)), len(values)
        scales, codes = payload[:header].view(torch.int16), payload[header:]
        whole = numel // _BLOCK
        stop = whole * _BLOCK
        if whole:
            _compress_blocks(values[:stop].view(whole, -1), scales[:whole], codes[: stop // 2])
        if stop < numel:
            last = torch.zeros(1, -(-(numel - stop) // 2) * 2, dtype=torch.float32, device="cpu")
            last[0, : numel - stop] = values[stop:]
            _compress_blocks(last, scales[whole:], codes[stop // 2 :])

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        header = self._header_nbytes(numel)
        bits = elements_of(payload[:header], torch.int16).int().bitwise_left_shift_(16)
        scales, codes = bits.view(torch.float32), elements_of(payload[header:], torch.uint8)
        values = torch.empty(2 * len(codes), dtype=torch.float32, device="cpu")
        torch.index_select(_pairs_of_values(), 0, codes.int(), out=values.view(torch.int64))
        whole = numel // _BLOCK
        stop = whole * _BLOCK
        values[:stop].view(whole, _BLOCK).mul_(scales[:whole, None])
        if stop < numel:
            values[stop:].mul_(scales[whole])
        return values[:numel]


def _compress_blocks(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Writes the scales, bfloat16 as int16, and the codes of blocks, which are the rows of `values`."""
    low, high = values.amin(1), values.amax(1)
    largest = torch.where(high >= -low, high, low)
    valid = largest.abs() <= LARGEST
    if not valid.all():
        values = torch.where(valid[:, None], values, 0)  # NaN converts to no integer
        largest = largest.masked_fill(~valid, torch.nan)
    largest.masked_fill_(largest.abs() < 2.0**-100, 0)
    # Rounds to bfloat16 towards 0, so that no decoded value is larger than the largest, which may be the largest of its
    # dtype. Done on integers, because torch's conversion gives different NaN bits with different CPU instructions.
    bits = largest.view(torch.int32) >> 16
    scales.copy_(bits)
    scale = bits.bitwise_left_shift_(16).view(torch.float32)
    inverse = torch.where(scale.abs() > 0, _STEPS / scale, 0)
    steps = (values * inverse[:, None]).to(torch.int8)
    torch.index_select(_codes_by_pair(), 0, steps.view(-1).view(torch.uint16).int(), out=codes)
