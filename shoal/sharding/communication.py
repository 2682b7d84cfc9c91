"""The messages of sharding over a process group: tensors from their owner to all ranks, and sums from all ranks to the
owner.

The means depend on the backend. On gloo, CPU tensors travel as point-to-point messages of a few MiB, for three reasons.
This is fastest: gloo's broadcast and reduce wait for one hop after the other, and its reduce-scatter is an all-reduce
inside. Only a failed message tells which rank is to blame. And point-to-point messages need no thread of the backend,
so they may run beside collectives of other code. With other backends (NCCL) and for tensors on other devices, the
backend's own broadcast and reduce are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.flat import Span
from shoal.sharding.failures import RankLost
from shoal.sharding.partition import PARCEL_BYTES, Parcel

Finish = Callable[[], None]
"""Waits until an operation that was started is done."""

Works = list[tuple[int | None, dist.Work]]
"""The operations under way, each with the other rank (None for all ranks)."""

WINDOW: Final = 4
"""The number of parcels under way at a time. It bounds the memory of receive buffers."""

# Tags distinguish the messages that two threads of a rank may send at the same time.
GRADIENTS, PARAMETERS, STATES, OVERLAP = 0x5A0, 0x5A1, 0x5A2, 0x5B0

_threads: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""For each process group, the number of objects that send gradients from a thread of their own."""


def run_in_window(starts: Iterable[Callable[[], Finish]]) -> None:
    """Starts one operation after the other, with at most `WINDOW` under way, and finishes all."""
    pending: deque[Finish] = deque()
    for start in starts:
        if len(pending) == WINDOW:
            pending.popleft()()
        pending.append(start())
    for finish in pending:
        finish()


class Communication:
    """Messages among the ranks of one process group. Every rank calls the same methods in the same order.

    Args:
        group: the process group.
        device: the device of tensors that belong to no parameter (headers, states). If the backend does not reach it, a
            device of the backend is used instead.

    Attributes:
        rank: this process's rank in the group.
        ranks: the group's size.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        backends = dict(item.split(":") for item in dist.get_backend_config(group).split(","))
        self.by_messages = backends.get("cpu") == "gloo"
        reached = device.type in backends
        self.device = device if reached or not backends else torch.device(next(iter(backends)))
        self._spare: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._gradients = GRADIENTS

    def send_from_thread(self) -> None:
        """Gives gradients a tag of their own, because other objects of this process group may send theirs at the same
        time.
        """
        _threads[self.group] = _threads.get(self.group, 0) + 1
        self._gradients = GRADIENTS + (_threads[self.group] << 16) % 2**31

    def share(self, parcel: Parcel, tensors: Mapping[int, Tensor], tag: int = PARAMETERS) -> Finish:
        """Sends a parcel from its owner to all other ranks.

        Args:
            parcel: slices of ``tensors``.
            tensors: the tensors by number, 1-D and contiguous. The owner reads them, the other ranks write to them.
            tag: the tag of the messages.
        """
        first = tensors[parcel.slices[0].tensor]
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        spare = None
        if len(parcel.slices) == 1:
            buffer = first[parcel.slices[0].span.slice]
        else:
            buffer, spare = self._buffer(parcel.numel, first)
        if parcel.owner == self.rank and spare is not None:
            torch.cat([tensors[part.tensor][part.span.slice] for part in parcel.slices], out=buffer)
        if not self._direct(first):
            source = dist.get_global_rank(self.group, parcel.owner)
            works: Works = [(None, dist.broadcast(_raw(buffer), source, self.group, async_op=True))]
        elif parcel.owner == self.rank:
            works = [(rank, self._send(buffer, rank, tag)) for rank in others]
        else:
            works = [(parcel.owner, self._receive(buffer, parcel.owner, tag))]

        def finish() -> None:
            _wait(works)
            if spare is not None:
                if parcel.owner != self.rank:
                    _unpack(buffer, parcel, tensors)
                self._recycle(spare)

        return finish

    def add_up(self, parcel: Parcel, tensors: Mapping[int, Tensor], total: Tensor | None) -> Finish:
        """Adds up a parcel of all ranks on its owner: the owner's own values first, then the others' in the order of
        ranks.

        Args:
            parcel: slices of ``tensors``.
            tensors: this rank's addends by number, 1-D and contiguous.
            total: on the owner, the 1-D memory for the sum, with the slices one after the other. If there is one slice
                only, it may be the memory of that slice. None on the other ranks.
        """
        first = tensors[parcel.slices[0].tensor]
        if not self._direct(first):
            return self._reduce(parcel, tensors, total, first)
        if parcel.owner != self.rank:
            if len(parcel.slices) == 1:
                works: Works = [
                    (parcel.owner, self._send(first[parcel.slices[0].span.slice], parcel.owner, self._gradients))
                ]
                return lambda: _wait(works)
            buffer, spare = self._buffer(parcel.numel, first)
            torch.cat([tensors[part.tensor][part.span.slice] for part in parcel.slices], out=buffer)
            works = [(parcel.owner, self._send(buffer, parcel.owner, self._gradients))]

            def sent() -> None:
                _wait(works)
                self._recycle(spare)

            return sent

        incoming = []
        for rank in range(self.ranks):
            if rank != self.rank:
                buffer, spare = self._buffer(parcel.numel, first)
                incoming.append((rank, self._receive(buffer, rank, self._gradients), buffer, spare))

        def added() -> None:
            assert total is not None
            if len(parcel.slices) == 1:
                summed = first[parcel.slices[0].span.slice]
            else:
                summed = torch.cat([tensors[part.tensor][part.span.slice] for part in parcel.slices], out=total)
            for rank, work, buffer, spare in incoming:
                _wait([(rank, work)])
                summed = torch.add(summed, buffer, out=total)
                self._recycle(spare)
            if summed is not total:  # there is only one rank
                total.copy_(summed)

        return added

    def _reduce(self, parcel: Parcel, tensors: Mapping[int, Tensor], total: Tensor | None, like: Tensor) -> Finish:
        parts = [tensors[part.tensor][part.span.slice] for part in parcel.slices]
        # A copy, because some backends leave partial sums in the tensor on ranks that do not own it.
        buffer, spare = self._buffer(parcel.numel, like)
        torch.cat(parts, out=buffer)
        target = dist.get_global_rank(self.group, parcel.owner)
        work = dist.reduce(buffer, target, group=self.group, async_op=True)

        def finish() -> None:
            _wait([(None, work)])
            if total is not None:
                total.copy_(buffer)
            self._recycle(spare)

        return finish

    def exchange(self, header: Tensor) -> Callable[[], list[Tensor]]:
        """Starts to send a small 1-D CPU tensor, of equal size on all ranks, to all ranks. The result waits and returns
        all of them, by rank.
        """
        if not self.by_messages:
            there = header.to(self.device)
            received = [torch.empty_like(there) for _ in range(self.ranks)]
            work = dist.all_gather(received, there, group=self.group, async_op=True)

            def gathered() -> list[Tensor]:
                _wait([(None, work)])
                return [tensor.cpu() for tensor in received]

            return gathered
        headers = [header if rank == self.rank else torch.empty_like(header) for rank in range(self.ranks)]
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        works: Works = [(rank, self._send(header, rank, self._gradients)) for rank in others]
        works += [(rank, self._receive(headers[rank], rank, self._gradients)) for rank in others]

        def exchanged() -> list[Tensor]:
            _wait(works)
            return headers

        return exchanged

    def send_all(self, tensor: Tensor, to: int) -> None:
        """Sends a 1-D contiguous tensor of any size and device to one rank, chunk by chunk."""

        def start(chunk: Tensor) -> Finish:
            there = chunk if self._reaches(chunk) else chunk.to(self.device)
            works: Works = [(to, self._send(there, to, STATES))]
            return lambda: _wait(works)

        run_in_window(partial(start, chunk) for chunk in chunks_of(tensor))

    def receive_all(self, tensor: Tensor, sender: int) -> None:
        """Receives a tensor from :meth:`send_all`; ``tensor`` must have the same size and dtype."""
        run_in_window(self.receiving(tensor, sender))

    def receiving(self, tensor: Tensor, sender: int) -> Iterator[Callable[[], Finish]]:
        """The steps of :meth:`receive_all`, for :func:`run_in_window`: each starts to receive one chunk."""

        def start(chunk: Tensor) -> Finish:
            there = chunk if self._reaches(chunk) else torch.empty_like(chunk, device=self.device)
            works: Works = [(sender, self._receive(there, sender, STATES))]

            def finish() -> None:
                _wait(works)
                if there is not chunk:
                    chunk.copy_(there)

            return finish

        return (partial(start, chunk) for chunk in chunks_of(tensor))

    def _direct(self, tensor: Tensor) -> bool:
        return self.by_messages and tensor.device.type == "cpu"

    def _reaches(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type

    def _send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        try:
            return _started(dist.isend(_raw(tensor), group=self.group, tag=tag, group_dst=to))
        except RuntimeError as error:
            raise RankLost(to, str(error)) from error

    def _receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        try:
            return _started(dist.irecv(_raw(tensor), group=self.group, tag=tag, group_src=sender))
        except RuntimeError as error:
            raise RankLost(sender, str(error)) from error

    def _buffer(self, numel: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer of ``numel`` elements, recycled if possible, and the whole memory that :meth:`_recycle` takes
        back.
        """
        spare = self._spare.setdefault((like.dtype, like.device), [])
        whole = (
            spare.pop() if spare else torch.empty(PARCEL_BYTES // like.itemsize, dtype=like.dtype, device=like.device)
        )
        return whole[:numel], whole

    def _recycle(self, whole: Tensor) -> None:
        self._spare[whole.dtype, whole.device].append(whole)


def _wait(works: Works) -> None:
    for rank, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(rank, str(error)) from error


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not in the process group of its ZeroRedundancyOptimizer")
    return work


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes: every backend can send them, whatever the dtype."""
    return tensor.view(torch.uint8)


def _unpack(buffer: Tensor, parcel: Parcel, tensors: Mapping[int, Tensor]) -> None:
    at = 0
    for part in parcel.slices:
        tensors[part.tensor][part.span.slice].copy_(buffer[at : at + len(part.span)])
        at += len(part.span)


def chunks_of(tensor: Tensor) -> list[Tensor]:
    """A 1-D tensor in chunks of at most `PARCEL_BYTES`; none if it is empty."""
    spans = Span(0, tensor.numel()).split(max(1, PARCEL_BYTES // tensor.itemsize))
    return [tensor[span.slice] for span in spans]
