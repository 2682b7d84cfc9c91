"""The parameters of all groups: where they lie, how they are divided, and how they get back to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

from shoal.flat import MADE_IN_INFERENCE, FlatBuffer, Span
from shoal.sharding.communication import Communication, run_in_window
from shoal.sharding.flat_views import flat, is_dense, shaped_like
from shoal.sharding.partition import (
    Bucket,
    Parcel,
    Share,
    Size,
    Slice,
    buckets_of,
    cut_evenly,
    deal_greedily,
    parcels_of,
    whole_shares,
)


class Parameters:
    """All parameters, in buckets, each bucket divided over the ranks.

    Args:
        ranks: number of ranks.
        flat_buffers: move each bucket into memory of its own, so that a rank's share of it is one contiguous stretch.

    Attributes:
        params: the parameters of all groups, in order. The numbers in slices are indices into it.
        buckets: about in the order in which backward finishes them.
        loads: the bytes of parameters that each rank owns.
    """

    def __init__(self, ranks: int, *, flat_buffers: bool) -> None:
        self.params: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self.loads = [0] * ranks
        self._sizes: list[Size] = []
        self._flat_buffers: list[FlatBuffer] | None = [] if flat_buffers else None
        self._views: list[dict[int, Tensor]] = []  # of each flat buffer, by parameter
        self._parcels: list[list[Parcel]] = []

    def add(self, groups: Sequence[Sequence[Tensor]], rank: int, cut: Sequence[bool]) -> list[list[Slice]]:
        """Divides the parameters of new groups over the ranks. Earlier parameters keep their owners.

        Args:
            groups: the parameters of each group.
            rank: this rank.
            cut: for each group, whether shares may begin and end inside a parameter.

        Returns:
            The slices of ``rank``, group by group, in the order of parameters.

        Raises:
            ValueError: if a parameter was made within `inference_mode`, is not dense, or shares memory with another and
                is to be moved. Nothing is changed then.
        """
        new = [param for group in groups for param in group]
        for number, param in enumerate(new, len(self.params)):
            if param.layout is not torch.strided:
                raise ValueError(f"parameter {number} is {param.layout}: only strided parameters can be divided")
            if param.is_inference():
                raise ValueError(f"parameter {number}, of shape {tuple(param.shape)}, is {MADE_IN_INFERENCE}")
            if self._flat_buffers is None and not is_dense(param):
                raise ValueError(
                    f"parameter {number}, of shape {tuple(param.shape)} and stride {param.stride()}, does not fill its "
                    "memory: pass parameters_as_bucket_view=True to move parameters into memory of their own"
                )
        numbers = count(len(self.params))
        numbered = [[next(numbers) for _ in group] for group in groups]
        self._sizes += [Size(p.numel(), p.itemsize, (p.dtype, p.device, p.requires_grad)) for p in new]
        self.params += new
        buckets = self._divide(numbered, cut)
        self.buckets += buckets
        for bucket in buckets:
            self._lay_out(bucket)
        owned = sorted((part for bucket in buckets for part in bucket.shares[rank]), key=lambda part: part.tensor)
        return [[part for part in owned if part.tensor in set(group)] for group in numbered]

    def _divide(self, groups: Sequence[Sequence[int]], cut: Sequence[bool]) -> list[Bucket]:
        """Whole parameters first: the others even the loads out."""
        whole = [group for group, is_cut in zip(groups, cut, strict=True) if not is_cut]
        owners: dict[int, int] = {}
        for group in whole:
            owners |= deal_greedily(self._sizes, group, self.loads)
        buckets = []
        for params in buckets_of(self._sizes, [number for group in whole for number in group]):
            # Sorted by owner, so that each share is one stretch of a flat buffer.
            params = tuple(sorted(params, key=lambda number: owners[number]))
            buckets.append(Bucket(params, whole_shares(self._sizes, params, owners, len(self.loads))))
        others = [number for group, is_cut in zip(groups, cut, strict=True) if is_cut for number in group]
        for params in buckets_of(self._sizes, others):
            buckets.append(Bucket(params, cut_evenly(self._sizes, params, self.loads)))
        if not (whole and others):
            return buckets
        return sorted(buckets, key=lambda bucket: max(bucket.params), reverse=True)  # as backward finishes them

    def _lay_out(self, bucket: Bucket) -> None:
        itemsize = self._sizes[bucket.params[0]].itemsize
        if self._flat_buffers is None:
            self._parcels.append(parcels_of(bucket.shares, itemsize))
            return
        params = [self.params[number] for number in bucket.params]
        before = [param.detach() for param in params]
        buffer = FlatBuffer.adopt(params)
        entries = buffer.layout.entries
        starts = dict(zip(bucket.params, (entry.span.start for entry in entries), strict=True))
        for param, old, entry in zip(params, before, entries, strict=True):
            if is_dense(old) and not old.is_contiguous():  # such as channels_last, by which torch chooses kernels
                param.data = shaped_like(buffer.flat[0][entry.span.slice], old).copy_(old)
        self._views.append({number: self.params[number].detach() for number in bucket.params})
        shares: list[Share] = []
        for share in bucket.shares:
            ends = [starts[part.tensor] + part.span.stop for part in share]
            shares.append((Slice(0, Span(starts[share[0].tensor] + share[0].span.start, ends[-1])),) if share else ())
        self._flat_buffers.append(buffer)
        self._parcels.append(parcels_of(shares, itemsize))

    def follow(self) -> None:
        """Brings parameters back into the flat buffers if user code gave them other memory (``param.data = …``)."""
        if self._flat_buffers is None:
            return
        with torch.no_grad():
            for views in self._views:
                for number, view in views.items():
                    param = self.params[number]
                    if param.data_ptr() != view.data_ptr() or param.stride() != view.stride():
                        view.copy_(param)
                        param.data = view

    def gather(self, communication: Communication, chosen: Iterable[int]) -> None:
        """Sends the shares of some buckets from their owners to all ranks.

        Args:
            communication: the messages of the process group.
            chosen: the buckets' numbers, equal on all ranks. An iterator may update each bucket just before it yields
                its number, while earlier buckets are on their way.
        """
        run_in_window(
            partial(communication.share, parcel, memory)
            for number in chosen
            for memory in (self._memory(number),)
            for parcel in self._parcels[number]
        )

    def _memory(self, number: int) -> dict[int, Tensor]:
        """The tensors, by number, to which the slices of a bucket's parcels refer."""
        if self._flat_buffers is not None:
            return {0: self._flat_buffers[number].flat[0]}
        return {n: flat(self.params[n]) for n in self.buckets[number].params}

    def spread(self, communication: Communication, groups: Sequence[Sequence[Tensor]]) -> None:
        """Sends the values of these groups from rank 0 to all ranks."""
        for param in (param for group in groups for param in group):
            parcels = parcels_of([(Slice(0, Span(0, param.numel())),)], param.itemsize)
            run_in_window(partial(communication.share, parcel, {0: flat(param)}) for parcel in parcels)

    def updated(self) -> list[int]:
        """The buckets in which a step may change something: those with a parameter that requires or has a gradient."""
        return [
            number
            for number, bucket in enumerate(self.buckets)
            if any(self.params[n].requires_grad or self.params[n].grad is not None for n in bucket.params)
        ]
