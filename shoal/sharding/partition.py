"""Which rank owns which elements: parameters cut into one share per rank. Pure functions with equal results on every
rank.

The elements of a parameter are counted in the order of its memory. Parameters are gathered into *buckets* of one dtype
and device. Each bucket is cut into one share per rank, so the messages of a bucket are spread over all ranks, and
communication bucket by bucket keeps all ranks busy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Final

from shoal.flat import Span

ALIGNMENT: Final = 64
"""Bytes. A parameter is cut only at multiples of this, the size of a cache line and of the widest vector registers."""

BUCKET_BYTES: Final = 25 * 2**20
"""A bucket is full when the next parameter would exceed this; a larger parameter is a bucket of its own."""

PARCEL_BYTES: Final = 2**22
"""The largest message."""

DIRECT_BYTES: Final = 2**17
"""Bytes. From this size on a slice is a message of its own, sent from and received into its memory. Smaller slices are
packed.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The properties of a parameter that partitioning needs. Only parameters with equal ``place`` share a bucket."""

    numel: int
    itemsize: int
    place: Hashable

    @property
    def nbytes(self) -> int:
        """The parameter's size in bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements ``span``, in the order of memory, of the tensor at index ``tensor`` of a list of tensors."""

    tensor: int
    span: Span


Share = tuple[Slice, ...]
"""The slices of a bucket that one rank owns, in the bucket's order."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together: their numbers, and the share of each rank."""

    params: tuple[int, ...]
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message of at most `PARCEL_BYTES` with values that ``owner`` owns: several slices packed, or one slice in
    place.
    """

    owner: int
    slices: Share

    @property
    def numel(self) -> int:
        """Elements of all slices together."""
        return sum(len(part.span) for part in self.slices)


def buckets_of(sizes: Sequence[Size], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Gathers parameters into buckets, the last parameters first: about the order in which backward finishes them.

    Within a bucket the parameters are in their own order.

    Args:
        sizes: the sizes of all parameters.
        numbers: the parameters to gather, as indices into ``sizes``.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number in reversed(numbers):
        size = sizes[number]
        bucket, nbytes = filling.get(size.place, ([], 0))
        if not bucket or nbytes + size.nbytes > BUCKET_BYTES:
            bucket, nbytes = [], 0
            buckets.append(bucket)
        bucket.append(number)
        filling[size.place] = bucket, nbytes + size.nbytes
    return [tuple(reversed(bucket)) for bucket in buckets]


def cut_evenly(sizes: Sequence[Size], params: Sequence[int], loads: list[int]) -> tuple[Share, ...]:
    """Cuts one bucket so that the total loads of all ranks, earlier buckets included, are even.

    First, every cut goes to the possible place nearest to its ideal one. This alone keeps the loads within two
    `ALIGNMENT`. Then the cuts between the most and the least loaded rank move by one place, as long as this makes the
    loads more even.

    Args:
        sizes: the sizes of all parameters.
        params: the parameters of the bucket, all of one itemsize.
        loads: bytes that each rank owns so far; changed to include the bucket.
    """
    ranks, itemsize = len(loads), sizes[params[0]].itemsize
    ends = list(accumulate(sizes[number].numel for number in params))
    unit = ALIGNMENT // itemsize
    load = sum(loads) + ends[-1] * itemsize
    cuts, before = [0], 0
    for rank in range(1, ranks):
        before += loads[rank - 1]
        # Half an element is rounded to the lower rank: if there are fewer elements than ranks, the first rank has one.
        wanted = min(max(math.floor((load * rank / ranks - before) / itemsize + 0.5), cuts[-1]), ends[-1])
        cuts.append(max(cuts[-1], _nearest_cut(ends, wanted, unit)))
    cuts.append(ends[-1])

    def loads_with(cuts: Sequence[int]) -> list[int]:
        return [had + (stop - start) * itemsize for had, (start, stop) in zip(loads, pairwise(cuts), strict=True)]

    after = loads_with(cuts)
    while max(after) - min(after) > ALIGNMENT:
        moved = _move_cuts(ends, cuts, after.index(max(after)), after.index(min(after)), unit)
        better = loads_with(moved)
        if list(moved) != sorted(moved) or _spread(better) >= _spread(after):
            break
        cuts, after = moved, better
    loads[:] = after
    return tuple(_slices(params, ends, Span(start, stop)) for start, stop in pairwise(cuts))


def deal_greedily(sizes: Sequence[Size], numbers: Sequence[int], loads: list[int]) -> dict[int, int]:
    """Assigns whole parameters to ranks: the largest first, each to the rank with the fewest bytes so far.

    This is sorted greedy scheduling, as torch's `ZeroRedundancyOptimizer` does it within each parameter group.

    Args:
        sizes: the sizes of all parameters.
        numbers: the parameters of one group.
        loads: bytes that each rank owns so far; changed to include the group.

    Returns:
        The owner of each parameter, in the order of assignment.
    """
    owners = {}
    for number in sorted(numbers, key=lambda number: sizes[number].nbytes, reverse=True):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number].nbytes
    return owners


def whole_shares(sizes: Sequence[Size], params: Sequence[int], owners: dict[int, int], ranks: int) -> tuple[Share, ...]:
    """The shares of a bucket whose parameters are not cut."""
    return tuple(
        tuple(Slice(number, Span(0, sizes[number].numel)) for number in params if owners[number] == rank)
        for rank in range(ranks)
    )


def parcels_of(shares: Sequence[Share], itemsize: int) -> list[Parcel]:
    """Packs the shares of all ranks into messages, ordered so that the owners take turns."""
    packed = [_pack(owner, share, itemsize) for owner, share in enumerate(shares)]
    return [parcel for turn in zip_longest(*packed) for parcel in turn if parcel is not None]


def _pack(owner: int, share: Share, itemsize: int) -> list[Parcel]:
    parcels: list[Parcel] = []
    small: list[Slice] = []
    room = PARCEL_BYTES
    for part in share:
        nbytes = len(part.span) * itemsize
        if nbytes >= DIRECT_BYTES:
            pieces = part.span.split(PARCEL_BYTES // itemsize)
            parcels.extend(Parcel(owner, (Slice(part.tensor, piece),)) for piece in pieces)
            continue
        if nbytes > room:
            parcels.append(Parcel(owner, tuple(small)))
            small, room = [], PARCEL_BYTES
        if nbytes:
            small.append(part)
            room -= nbytes
    if small:
        parcels.append(Parcel(owner, tuple(small)))
    return parcels


def _nearest_cut(ends: Sequence[int], wanted: int, unit: int) -> int:
    """The place nearest to ``wanted`` where a parameter ends or is at a multiple of ``unit`` elements."""
    start = 0
    for end in ends:
        if wanted <= end:
            offset = wanted - start
            low = offset // unit * unit
            high = min(low + unit, end - start)
            return start + (low if offset - low <= high - offset else high)
        start = end
    return start


def _move_cuts(ends: Sequence[int], cuts: Sequence[int], giver: int, taker: int, unit: int) -> list[int]:
    """Moves all cuts between two ranks to the next possible place, so that ``giver`` has less and ``taker`` has
    more.
    """
    moved = list(cuts)
    if giver < taker:
        for at in range(giver + 1, taker + 1):
            moved[at] = _place_before(ends, cuts[at], unit)
    else:
        for at in range(taker + 1, giver + 1):
            moved[at] = _place_after(ends, cuts[at], unit)
    return moved


def _place_before(ends: Sequence[int], cut: int, unit: int) -> int:
    start = max((end for end in (0, *ends) if end < cut), default=0)
    return max(start + (cut - start - 1) // unit * unit, 0)


def _place_after(ends: Sequence[int], cut: int, unit: int) -> int:
    start = max(end for end in (0, *ends) if end <= cut)
    stop = min((end for end in ends if end > cut), default=cut)
    return min(start + ((cut - start) // unit + 1) * unit, stop)


def _spread(loads: Sequence[int]) -> int:
    """The sum of squares: it falls with every move that makes loads more even."""
    return sum(load * load for load in loads)


def _slices(params: Sequence[int], ends: Sequence[int], share: Span) -> Share:
    slices = []
    start = 0
    for number, end in zip(params, ends, strict=True):
        part = Span(start, end).intersect(share)
        if part:
            slices.append(Slice(number, Span(part.start - start, part.stop - start)))
        start = end
    return tuple(slices)
