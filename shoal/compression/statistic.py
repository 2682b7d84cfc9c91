"""Statistics of optimizers, where what counts is how much too large or too small a value is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.compression.codec import Codec, elements_of, payload_of
from shoal.compression.floats import FloatCodec

_OCTAVE: Final = 1 << 23  # between the bits of a float32 and those of its double
_OCTAVES: Final = 64
_HEADER: Final = 4
_SIGNED: Final = -1  # instead of the largest value
_LARGEST: Final = 0x7F7FFFFF  # the bits of the largest finite float32


@dataclass(frozen=True, slots=True)
class StatisticCodec(FloatCodec):
    """Sends a chunk that has no negative value and is finite by its logarithms, encoded by another codec; every other
    chunk as that codec does. 4 bytes more than that.

    Optimizers divide by the roots of such statistics: one that comes back as 0 makes an explosion of a step, and one
    that is a little too large only a smaller step. With logarithms it is the quotient that has the codec's error. The
    logarithm here is the number that the bits of a float32 are, over 2**23: to base 2, but linear between the powers of
    2; exact, monotone, and the same on every machine, as is the way back. What is encoded is how many octaves a value
    is below the largest of the chunk. (As that moves from round to round, so do the values that codes stand for. Else a
    statistic that decays by less than half a code between two rounds would stay where it is.)

    What was positive comes back positive. What is less than 2**-64 of the largest value, or than the smallest positive
    one (zeros, then), is sent as the larger of these two; a chunk of zeros as the codec does. Apart from that, where
    the codec has an error of e for a distance, e up to 1, the quotient of what comes back and what was sent is at most
    1 + e and at least 1 / (1 + e). With d the distance, at most 64 octaves, and in the chunk or block D the largest one
    and r their range, e is 2**-11 d for `Float16Compression`, 2**-11 r for `ScaledFloat16Compression`, r / 508 for
    `Uniform8BitQuantization` and 0.0074 D (or less, see there) for `BlockwiseQuantization`, each plus 2**-16; for
    `Quantile8BitQuantization` it is the width of the bin.

    Args:
        codec: which encodes the logarithms.
    """

    codec: Codec

    @property
    def name(self) -> str:  # type: ignore[override]  # of the codec that it holds
        """``statistic.`` and that of the codec."""
        return f"statistic.{self.codec.name}"

    def _compressed_nbytes(self, numel: int) -> int:
        return _HEADER + self.codec.encoded_nbytes(numel, torch.float32)

    def _compress(self, values: Tensor, payload: Tensor) -> None:
        header, codes = payload[:_HEADER].view(torch.int32), payload_of(payload[_HEADER:])
        greatest = values.amax()
        low, high = values.amin().item(), greatest.item()
        if not (low >= 0.0 < high < torch.inf):
            header.fill_(_SIGNED)
            codes[:] = self.codec.encode(values)
            return
        if low == 0.0:
            low = values.masked_fill(values == 0, torch.inf).amin().item()
        bits = values.clamp(min=max(low, high * 2.0**-_OCTAVES)).view(torch.int32)
        largest = greatest.view(torch.int32)
        header.copy_(largest)
        codes[:] = self.codec.encode((largest - bits).float().mul_(1 / _OCTAVE))

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        largest = int(elements_of(payload[:_HEADER], torch.int32).item())
        decoded = self.codec.decode(payload[_HEADER:], torch.float32, numel).float()
        if largest == _SIGNED:
            return decoded
        # Nobody can send what is not a positive number when it is decoded.
        below = decoded.clamp(0.0, _OCTAVES + 1.0).nan_to_num_(0.0).mul_(_OCTAVE).int()
        return below.neg_().add_(min(max(largest, 1), _LARGEST)).clamp_(min=1).view(torch.float32)
