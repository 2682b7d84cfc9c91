"""Moves values of parameters between the ranks of a cluster, in few collectives with bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from shoal.cluster.spans import Route, overlap

BUCKET_BYTES = 1 << 26  # the most that a rank sends or receives in one collective, unless one parameter has more


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a parameter: the values of adjacent elements, from number `start` on, in a 1-D tensor."""

    start: int
    values: Tensor

    @property
    def span(self) -> range:
        return range(self.start, self.start + self.values.numel())

    def view(self, span: range) -> Tensor:
        """A view of those elements of the span that this stretch has."""
        found = overlap(span, self.span)
        return self.values[found.start - self.start : found.stop - self.start] if found else self.values[:0]


@dataclass(slots=True)
class _Bucket:
    """Values of some parameters that are exchanged in one collective.

    Attributes:
        dtype, device: those of all values.
        out: for each rank, the values to send to it.
        into: for each rank, the memory for the values that it sends.
        settled: functions to call once the values have arrived.
        exchanged: see `Route`.
    """

    dtype: torch.dtype
    device: torch.device
    out: list[list[Tensor]]
    into: list[list[Tensor]]
    settled: list[Callable[[], object]] = field(default_factory=list)
    exchanged: int = 0

    def exchange(self, group: dist.ProcessGroup | None) -> None:
        """Exchange the values. A collective."""
        out = [values.to(self.device) for each in self.out for values in each]
        into = [values for each in self.into for values in each]
        sent = torch.cat(out) if out else torch.empty(0, dtype=self.dtype, device=self.device)
        sizes = [values.numel() for values in into]
        received = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        dist.all_to_all_single(
            received.view(torch.uint8),  # as bytes, since not all backends know all dtypes
            sent.view(torch.uint8),
            [sum(values.nbytes for values in each) for each in self.into],
            [sum(values.nbytes for values in each) for each in self.out],
            group=group,
        )
        for values, arrived in zip(into, torch.split(received, sizes), strict=True):
            values.copy_(arrived)
        for settle in self.settled:
            settle()


class ParameterExchange:
    """Moves values of parameters along their routes. All values have arrived when the context ends.

    All ranks add the same parameters in the same order, so they form the same buckets without messages. If no rank
    sends anything, there is no collective.

    Args:
        group: the ranks; None for a single process.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self._group, self._size = group, size
        self._buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}

    def __enter__(self) -> ParameterExchange:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for bucket in self._buckets.values():
                bucket.exchange(self._group)

    def add(
        self,
        route: Route,
        has: Sequence[Stretch],
        wants: Sequence[Stretch],
        device: torch.device,
        home: Tensor | None = None,
    ) -> None:
        """Move the values of one parameter.

        Args:
            route: the route of this rank.
            has: where this rank has values.
            wants: where this rank wants values.
            device: the device of the parameter, which decides the backend of the collective.
            home: a tensor to which `wants` is copied in the end, if it is not contiguous, so that `wants` is a copy.
        """
        for span in route.local:
            for source in has:
                for target in wants:
                    both = overlap(span, overlap(source.span, target.span))
                    target.view(both).copy_(source.view(both))
        dtype = (*has, *wants)[0].values.dtype
        settle = functools.partial(_bring_home, wants, home)
        if not route.exchanged:
            settle()
            return
        bucket = self._buckets.get((dtype, device))
        if bucket is not None and (bucket.exchanged + route.exchanged) * dtype.itemsize > BUCKET_BYTES:
            bucket.exchange(self._group)
            bucket = None
        if bucket is None:
            bucket = _Bucket(dtype, device, [[] for _ in range(self._size)], [[] for _ in range(self._size)])
            self._buckets[dtype, device] = bucket
        for rank, span in route.out:
            bucket.out[rank] += [source.view(span) for source in has]
        for rank, span in route.into:
            bucket.into[rank] += [target.view(span) for target in wants]
        bucket.settled.append(settle)
        bucket.exchanged += route.exchanged


def _bring_home(wants: Sequence[Stretch], home: Tensor | None) -> None:
    if home is not None and not home.is_contiguous():
        home.copy_(wants[0].values.view(home.shape))
