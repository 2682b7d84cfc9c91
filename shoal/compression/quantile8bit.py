"""8 bits per element, with finer steps where there are more elements."""

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
_SAMPLE: Final = 1024  # number of elements from which the median is estimated; it only decides where keys are finest


@functools.cache
def _ascending() -> tuple[Tensor, Tensor]:
    """The bits of all float16 in the order of their values (NaN at both ends), and the rank of each in that order."""
    bits = torch.cat(
        [torch.arange(_FLOAT16 - 1, _FLOAT16 // 2 - 1, -1, device="cpu"), torch.arange(_FLOAT16 // 2, device="cpu")]
    )
    return bits, torch.argsort(bits)


@dataclass(frozen=True, slots=True)
class Quantile8BitQuantization(FloatCodec):
    """Sends each real float as the mean of its bin, one of 256 bins between quantiles of the chunk.

    The payload takes 1 byte per element and 1024 bytes per chunk.

    Border number k is the quantile t²(3 - 2t) with t = k/256. So a bin in the middle holds 1/171 of the elements, and
    bins hold fewer and fewer towards both ends, where values lie farther apart. (With the usual equal shares, the last
    bin holds a 256th of all elements: the mean square error is 15 times this one's for normal values, and 2/3 of it for
    evenly spread ones.) Borders are exact up to the precision of float16, relative to the distance from the chunk's
    median, so equal values share a bin. The error of an element is at most the width of its bin. A bin lies between two
    neighbouring borders, unless all its values are equal at that precision. The mean of the chunk does not change. A
    constant chunk is decoded exactly, up to 2**-24 of its value.

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
        scratch = (values + (0 - center)).mul_(factor)  # a sum, because -0.0 - 0.0 is not 0.0
        keys = scratch.view(torch.int32).copy_(scratch.to(torch.float16).view(torch.uint16))
        torch.index_select(_bins_by_float16(keys), 0, keys, out=codes)
        # bincount adds the elements in order, so these sums too are the same on every machine.
        sizes = torch.bincount(codes, minlength=_BINS).clamp_(min=1)
        codebook.copy_(torch.bincount(codes, values.double(), minlength=_BINS).div_(sizes))

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        codebook = elements_of(payload[:_CODEBOOK_NBYTES], torch.float32)
        codes = elements_of(payload[_CODEBOOK_NBYTES:], torch.uint8)
        return torch.index_select(codebook, 0, codes.int())


def _bins_by_float16(keys: Tensor) -> Tensor:
    """The bin, uint8, of each float16, indexed by its bits: the bin of the middle of its elements in the sorted
    chunk.
    """
    bits, places = _ascending()
    counts = torch.bincount(keys, minlength=_FLOAT16)[bits]
    middles = counts.cumsum(0).mul_(2).sub_(counts)  # twice the ranks of the middles
    step = torch.arange(1, _BINS, device="cpu")  # t²(3 - 2t) in integers, the same on every machine; 2**24 is 256 cubed
    borders = step * step * (3 * _BINS - 2 * step) * (2 * len(keys)) >> 24
    first = torch.searchsorted(middles, borders)
    return torch.bincount(first, minlength=_FLOAT16 + 1).cumsum(0)[places].to(torch.uint8)
