"""A codec that sends only the largest values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.compression.codec import elements_of
from shoal.compression.floats import LARGEST, FloatCodec
from shoal.compression.info import CompressionInfo, TensorRole

_SWEEPS: Final = 4  # sweeps of Lloyd's algorithm: a fifth changes nothing measurable


@dataclass(frozen=True, slots=True)
class _Rows:
    """Chunks of equal size, one after the other: their number, the elements of each, and how many of these are sent."""

    count: int
    size: int
    sent: int


@dataclass(frozen=True, slots=True)
class TopK(FloatCodec):
    """Sends, of each `chunk` real floats, only the `k` with the largest absolute values, in a few bits each. The others
    are decoded as zeros.

    With the defaults the payload takes 120 bytes per 4096 elements: 1/136.5 of float32.

    For parts of drifts, with error feedback (`error_feedback` of the averagers); without it nearly everything is lost.
    The mean of n such parts has up to n times as many values, so results need another codec:
    ``Compression.of(parts=TopK(), results=…)`` with `Blockwise4Bit()`, or with `TopK(k=64 * n)` for few peers. A `TopK`
    alone is used for both. A result then has as many values as one part, and most of each part arrives in later rounds.
    Parameters and statistics can't be sent by it.

    Chunks, k and bits are those of Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv
    2508.15706). Here a value is sent as its sign and the nearest of 2**(bits - 1) magnitudes, which Lloyd's algorithm
    chooses for each chunk. Of equal values the first are sent. If a chunk has fewer than k nonzero values, one
    magnitude is zero (unless `bits` is 1). The same numbers give the same bytes on every machine: indices are chosen by
    integer comparisons, and means are summed in order.

    A value that is not finite, or beyond ±2**126, makes its whole chunk NaN when it is decoded.

    Payload: the magnitudes of all chunks, float32; then the indices of all chunks, ascending in each, with as many bits
    as numbers below `chunk` need; then the codes of all values, `bits` bits each, where an odd code is negative. Bits
    are filled from the lowest, and each of the three is padded to a whole byte. The last chunk may be shorter: of n
    elements, it sends n k / `chunk`, rounded up.

    Args:
        k: the number of values sent of each chunk, from 1 to `chunk`. Default: 64.
        chunk: the number of elements of a chunk, from 2 to 65536. Default: 4096. (These are smaller than the chunks of
            a round.)
        bits: the bits of a value, from 1 to 4. Default: 2.

    Raises:
        ValueError: if a number is out of its range.
    """

    name: ClassVar[str] = "top_k"
    k: int = 64
    chunk: int = 4096
    bits: int = 2

    def __post_init__(self) -> None:
        for option, low, high in (("chunk", 2, 1 << 16), ("k", 1, self.chunk), ("bits", 1, 4)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"TopK({option}={value!r}): give a whole number from {low} to {high}")

    @property
    def spec(self) -> str:
        """``["top_k", k, chunk, bits]``"""
        return json.dumps([self.name, self.k, self.chunk, self.bits])

    def choose_compression(self, info: CompressionInfo) -> TopK:
        """This codec.

        Raises:
            ValueError: for a parameter or a statistic of an optimizer, most of which would be decoded as zero.
        """
        if info.role in (TensorRole.PARAMETER, TensorRole.OPTIMIZER):
            raise ValueError(
                f"TopK leaves most values out: it is for gradients and drifts, and {info.key!r} is a "
                f"{info.role.value} tensor. Give another compression for those"
            )
        return self

    # -- sizes

    @property
    def _levels(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _index_bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _rows(self, numel: int) -> list[_Rows]:
        """All whole chunks, then the shorter chunk, if there is one."""
        whole, left = divmod(numel, self.chunk)
        rows = [_Rows(whole, self.chunk, self.k)] if whole else []
        return rows + ([_Rows(1, left, -(-left * self.k // self.chunk))] if left else [])

    def _sizes(self, numel: int) -> tuple[int, int, int]:
        """The sizes in bytes of the magnitudes, the indices and the codes."""
        rows = self._rows(numel)
        sent = sum(some.count * some.sent for some in rows)
        magnitudes = 4 * self._levels * sum(some.count for some in rows)
        return magnitudes, -(-sent * self._index_bits // 8), -(-sent * self.bits // 8)

    def _compressed_nbytes(self, numel: int) -> int:
        return sum(self._sizes(numel))

    # -- bytes

    def _compress(self, values: Tensor, payload: Tensor) -> None:
        compressed, start = [], 0
        for rows in self._rows(len(values)):
            stop = start + rows.count * rows.size
            compressed.append(self._compress_rows(values[start:stop].view(rows.count, -1), rows.sent))
            start = stop
        magnitudes, indices, codes = (
            torch.cat([one.view(-1) for one in ones]) for ones in zip(*compressed, strict=True)
        )
        books, places, _ = self._sizes(len(values))
        payload[:books].view(torch.float32).copy_(magnitudes)
        payload[books : books + places] = _packed(indices, self._index_bits)
        payload[books + places :] = _packed(codes, self.bits)

    def _compress_rows(self, values: Tensor, sent: int) -> tuple[Tensor, Tensor, Tensor]:
        """The magnitudes, indices and codes of chunks, which are the rows of `values`."""
        indices = _largest(values, sent)
        kept = values.gather(1, indices)
        sizes = kept.abs()
        valid = (sizes <= LARGEST).all(1, keepdim=True)
        sizes = torch.where(valid, sizes, 0)
        magnitudes, nearest = _levels_of(sizes, self._levels)
        codes = nearest.mul_(2).add_(kept.signbit())
        return magnitudes.masked_fill_(~valid, torch.nan), indices, codes

    def _extract(self, payload: memoryview, numel: int) -> Tensor:
        books, places, _ = self._sizes(numel)
        rows = self._rows(numel)
        sent = sum(some.count * some.sent for some in rows)
        magnitudes = elements_of(payload[:books], torch.float32).view(-1, self._levels)
        indices = _unpacked(elements_of(payload[books : books + places], torch.uint8), self._index_bits, sent)
        codes = _unpacked(elements_of(payload[books + places :], torch.uint8), self.bits, sent)
        book = torch.stack([magnitudes, -magnitudes], dim=2).view(len(magnitudes), -1)
        values = torch.zeros(numel, dtype=torch.float32, device="cpu")
        first = chunk = start = 0
        for some in rows:
            stop = first + some.count * some.sent
            mine, of_mine = indices[first:stop].view(some.count, -1), book[chunk : chunk + some.count]
            _check(mine, some.size)
            out = values[start : start + some.count * some.size].view(some.count, -1)
            out.scatter_(1, mine, of_mine.gather(1, codes[first:stop].view(some.count, -1)))
            bad = ~of_mine.isfinite().all(1)
            if bad.any():
                out[bad] = torch.nan
            first, chunk, start = stop, chunk + some.count, start + some.count * some.size
        return values


def _check(indices: Tensor, size: int) -> None:
    """Raises ValueError for indices that no encoder can have made."""
    if (indices[:, -1] >= size).any():
        raise ValueError(f"a top_k payload has an index beyond its chunk of {size} elements")
    if (indices[:, 1:] <= indices[:, :-1]).any():
        raise ValueError("a top_k payload has indices that do not ascend")


def _largest(values: Tensor, sent: int) -> Tensor:
    """The indices, ascending, of the `sent` largest absolute values of each row. Of equal values it takes the first."""
    bits = values.view(torch.int32) & 0x7FFFFFFF  # has the order of the absolute values; NaN is the largest
    largest, indices = bits.topk(sent, sorted=False)
    least = largest.amin(1, keepdim=True)
    at_least = bits >= least
    if int(at_least.count_nonzero()) == indices.numel():
        return indices.sort(1).values
    # torch does not say which of equal values topk takes. The values above the least are certain; of the equal ones,
    # the first fill the rest.
    above = bits > least
    equal, lacks = at_least ^ above, sent - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= lacks))
    return chosen.view(-1).nonzero().view(-1, sent) % bits.shape[1]


def _levels_of(sizes: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Magnitudes that represent absolute values, the rows of `sizes`, and the number of the nearest magnitude for
    each.
    """
    rows, wide = len(sizes), sizes.double()
    low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    middles = (torch.arange(levels, dtype=torch.float64, device="cpu") + 0.5) / levels
    magnitudes = low + (high - low) * middles
    is_zero = (low == 0) & (torch.arange(levels, device="cpu") == 0) & (levels > 1)
    first = torch.arange(rows, device="cpu").mul_(levels)[:, None]
    nearest = torch.zeros_like(sizes, dtype=torch.int64)
    for _ in range(_SWEEPS):
        nearest = _nearest(wide, magnitudes)
        # bincount adds the elements in order, so the sums are the same on every machine.
        bins = (nearest + first).view(-1)
        count = torch.bincount(bins, minlength=rows * levels)
        mean = torch.bincount(bins, wide.view(-1), minlength=rows * levels) / count.clamp(min=1)
        magnitudes = torch.where(count > 0, mean, magnitudes.view(-1)).view(rows, levels).masked_fill_(is_zero, 0)
    return magnitudes.float(), _nearest(wide, magnitudes)


def _nearest(values: Tensor, magnitudes: Tensor) -> Tensor:
    borders = (magnitudes[:, 1:] + magnitudes[:, :-1]) / 2
    nearest = torch.zeros_like(values, dtype=torch.int64)
    for border in borders.unbind(1):
        nearest += values > border[:, None]
    return nearest


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of ``bits`` bits as bytes, uint8."""
    flat = (numbers[:, None] >> torch.arange(bits, device="cpu")).bitwise_and_(1).view(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (flat << torch.arange(8, device="cpu")).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers in bytes from `_packed`, int64."""
    flat = ((packed[:, None] >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1).view(-1)[: count * bits]
    return (flat.view(count, bits).long() << torch.arange(bits, device="cpu")).sum(1)
