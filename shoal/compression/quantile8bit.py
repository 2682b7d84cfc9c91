"""8 bits an element, finer where there are more elements."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.codec import elements_of
from shoal.compression.floats import LARGEST, FloatCodec

_BINS: Final = 256
_CODEBOOK_NBYTES: Final = _BINS * 4
_FLOAT16: Final = 1 << 16
_SAMPLE: Final = 1024  # elements from which the median is estimated; it only decides where keys are finest


@functools.cache
def _ascending() -> tuple[Tensor, Tensor]:
    """The bits of all float16 in the order of their values (NaN at both ends), and the place of each in that order."""
    bits = torch.cat(
        [torch.arange(_FLOAT16 - 1, _FLOAT16 // 2 - 1, -1, device="cpu"), torch.arange(_FLOAT16 // 2, device="cpu")]
    )
    return bits, torch.argsort(bits)


@dataclass(frozen=True, slots=True)
class Quantile8BitQuantization(FloatCodec):
    """Sends real floats as the mean of the bin that they are in, of 256 bins between quantiles of the chunk: 1 byte an
    element and 1024 a chunk.

    Border number k is the quantile t²(3 - 2t), t = k/256: a bin in the middle holds 1/171 of the elements, and bins
    hold fewer and fewer towards both ends, where values lie farther apart. (Equal shares, as elsewhere, put a 256th of
    all elements into the last bin: for normal values 15 times the mean square error, for evenly spread ones 2/3 of it.)
    Borders are exact up to the precision of float16, relative to the distance from the chunk's median, so equal values
    share a bin. The error of an element is at most the width of its bin, and a bin that is not of values that are equal
    at that precision lies between two neighbouring borders. The mean of the chunk stays. A constant chunk comes back
    exactly, up to 2**-24 of its value.

    A value that is not finite, or beyond ±2**126, makes the whole chunk NaN when it is decoded.
    """

    name: ClassVar[str] = "quantile_8bit"

    def _compressed_nbytes(self, numel: int) -> int:
        return _CODEBOOK_NBYTES + numel

    def _compress(self, values: Tensor, payload: Tensor) -> None:
        codebook, codes = payload[:_CODEBOOK_NBYTES].view(torch.float32), payload[_CODEBOOK_NBYTES:]
        low, high = values.amin().item(), values.amax().item()
        if not (low >= -LARGEST and high <= LARGEST):
            codebook.fill_(torch.nan)
            codes.zero_()
            return
        center = values[:: max(1, len(values) // _SAMPLE)].median()
        farthest = max(high - center.item(), center.item() - low)
        factor = 2.0 ** min(126, 15 - math.frexp(farthest)[1])
        scratch = (values + (0 - center)).mul_(factor)  # a sum, since -0.0 - 0.0 is not 0.0
        keys = scratch.view(torch.int32).copy_(scratch.to(torch.float16).view(torch.uint16))
        torch.index_select(_bins_by_float16(keys), 0, keys, out=codes)
        # bincount adds one element after the other, so these sums too are the same everywhere.
        sizes = torch.bincount(codes, minlength=_BINS).clamp_(min=1)
        codebook.copy_(torch.bincount(codes, values.double(), minlength=_BINS).div_(sizes))

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        codebook = elements_of(payload[:_CODEBOOK_NBYTES], torch.float32)
        codes = elements_of(payload[_CODEBOOK_NBYTES:], torch.uint8)
        return torch.index_select(codebook, 0, codes.int())


def _bins_by_float16(keys: Tensor) -> Tensor:
    """The bin, uint8, of each float16 by its bits: that of the middle of its elements in the sorted chunk."""
    bits, places = _ascending()
    counts = torch.bincount(keys, minlength=_FLOAT16)[bits]
    middles = counts.cumsum(0).mul_(2).sub_(counts)  # twice their ranks
    step = torch.arange(1, _BINS, device="cpu")  # t²(3 - 2t) in integers, the same on every machine; 2**24 is 256 cubed
    borders = step * step * (3 * _BINS - 2 * step) * (2 * len(keys)) >> 24
    first = torch.searchsorted(middles, borders)
    return torch.bincount(first, minlength=_FLOAT16 + 1).cumsum(0)[places].to(torch.uint8)
