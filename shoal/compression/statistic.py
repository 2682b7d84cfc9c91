"""A codec for statistics of optimizers, where the relative error of a value matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.compression.codec import Codec, elements_of, payload_of
from shoal.compression.floats import FloatCodec

_OCTAVE: Final = 1 << 23  # the difference between the bits of 2x and those of x, in float32
_OCTAVES: Final = 64
_HEADER: Final = 4
_SIGNED: Final = -1  # the header, if the values themselves are encoded; otherwise it is the largest value
_LARGEST: Final = 0x7F7FFFFF  # the bits of the largest finite float32


@dataclass(frozen=True, slots=True)
class StatisticCodec(FloatCodec):
    """Sends the logarithms of a chunk that is finite and has no negative value, encoded by another codec. Any other
    chunk is sent as that codec does. The payload takes 4 bytes more than that codec's.

    Optimizers divide by the roots of such statistics. A statistic that is decoded as 0 makes a step explode; one that
    is decoded a little too large only makes the step smaller. With logarithms, the codec's error applies to the
    quotient of the decoded value and the true one. The logarithm used here is the bits of a float32, read as an
    integer, over 2**23. It is the logarithm to base 2 at powers of 2, and linear between them. It and its inverse are
    exact, monotone and the same on every machine. The encoded number of a value is its distance: how many octaves it is
    below the largest value of the chunk. (The largest value changes from round to round, and with it the values that
    the codes represent. With fixed values, a statistic that decays by less than half a code between two rounds would
    never change.)

    Positive values are decoded as positive. A value below a floor is sent as the floor: the larger of 2**-64 of the
    largest value and the smallest positive value (which raises zeros). A chunk of zeros is sent as the codec does. For
    all other values: if the codec has an error of e for a distance, e up to 1, the quotient of the decoded value and
    the true one is at most 1 + e and at least 1 / (1 + e). Let d be the distance, at most 64 octaves; D the largest
    distance in the chunk or block; and r the range of distances there. Then e is 2**-11 d for `Float16Compression`,
    2**-11 r for `ScaledFloat16Compression`, r / 508 for `Uniform8BitQuantization` and 0.0074 D (or less, see there) for
    `BlockwiseQuantization`, each plus 2**-16. For `Quantile8BitQuantization` it is the width of the bin.

    Args:
        codec: encodes the logarithms.
    """

    codec: Codec

    @property
    def name(self) -> str:  # type: ignore[override]  # depends on the inner codec
        """``statistic.`` and the name of the codec."""
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
        # Whatever bytes a peer sends, the decoded values are positive numbers.
        below = decoded.clamp(0.0, _OCTAVES + 1.0).nan_to_num_(0.0).mul_(_OCTAVE).int()
        return below.neg_().add_(min(max(largest, 1), _LARGEST)).clamp_(min=1).view(torch.float32)
