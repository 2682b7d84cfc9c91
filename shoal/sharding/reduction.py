"""Gradients that go to their owners only, bucket by bucket while backward runs (ZeRO-2).

When backward has finished the gradients of a bucket, they are taken from the parameters (``param.grad`` is None again)
and sent to the ranks that own them, which add them up. So a rank keeps the gradients of its own share and of a few
buckets under way. Buckets are sent in the same order on all ranks. What a parameter has no gradient for counts as zero,
unless it has none on any rank: then it is left alone, as torch.optim leaves it.

With each bucket goes a header: whether this rank is live (see `Join`), and which parameters had a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import BoundedSemaphore
from typing import Final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.flat import keep_freed_memory
from shoal.sharding.communication import Communication, Finish, run_in_window
from shoal.sharding.memory import flat_like
from shoal.sharding.parameters import Parameters
from shoal.sharding.partition import Bucket, Parcel, Slice, parcels_of
from shoal.sharding.worker import Worker

BUCKETS_UNDER_WAY: Final = 3
"""Backward waits when it is so many buckets ahead: the bound of gradient memory."""


class Reduction:
    """Reduces the gradients of all parameters to their owners, from now on in every backward pass.

    Args:
        parameters: whose gradients.
        communication: of the process group.
        announce: called before the first message of a backward pass.

    Attributes:
        divide_by_live: whether the mean is over the live ranks, and not over all.
        live: the ranks that had inputs of their own in the last reduction.
    """

    def __init__(self, parameters: Parameters, communication: Communication, announce: Callable[[], object]) -> None:
        self._announce = announce
        self.divide_by_live = False
        self.live = list(range(communication.ranks))
        self._parameters = parameters
        self._communication = communication
        self._worker = Worker() if communication.by_messages else None
        self._room = BoundedSemaphore(BUCKETS_UNDER_WAY)
        self._jobs: list[tuple[int, Future[None]]] = []  # with the bucket's number
        self._handles: dict[int, RemovableHandle] = {}
        self._paused = False
        self._sent = 0  # reductions since the last take()
        self._pending: list[int] | None = None  # buckets that the current backward pass has still to send
        self._missing: dict[int, set[int]] = {}  # gradients that they lack
        self._parcels: dict[int, list[Parcel]] = {}
        self._reduced: dict[Slice, Tensor] = {}
        self._spare: dict[Slice, Tensor] = {}  # memory for gradients of parts of parameters
        self._updated: set[int] = set()
        self.watch()

    def watch(self) -> None:
        """Hooks into the backward pass of the parameters that require a gradient by now, and makes room for those."""
        # Twice: what else a pass frees lies between the gradients.
        keep_freed_memory(2 * sum(param.nbytes for param in self._parameters.params if param.device.type == "cpu"))
        this = weakref.ref(self)
        for number, param in enumerate(self._parameters.params):
            if param.requires_grad and number not in self._handles:

                def arrived(_: Tensor, number: int = number) -> None:
                    reduction = this()
                    if reduction is not None:
                        reduction._arrived(number)

                self._handles[number] = param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets gradients accumulate in ``param.grad``; the next backward pass outside sends the sums."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take(self) -> tuple[dict[Slice, Tensor | None], list[int]]:
        """Waits for the reduced gradients of this rank's share; the buckets where any rank had gradients.

        Reduces what is in ``param.grad`` if no backward pass has since the last time. Nothing is forgotten before
        :meth:`forget`.
        """
        if not self._sent:
            self.reduce_now()
        self._wait()
        return dict(self._reduced), sorted(self._updated)

    def arriving(self) -> Iterator[int]:
        """As :meth:`take`, but bucket by bucket: the number of each once it is reduced, and had gradients anywhere."""
        if not self._sent:
            self.reduce_now()
        if self._sent > 1 or not self._jobs:  # added up from several reductions, or here already
            self._wait()
            yield from sorted(self._updated)
            return
        jobs, self._jobs = self._jobs, []
        for number, job in jobs:
            job.result()
            if number in self._updated:
                yield number

    def of_bucket(self, number: int) -> dict[Slice, Tensor | None]:
        """The reduced gradients of this rank's share of one bucket."""
        share = self._parameters.buckets[number].shares[self._communication.rank]
        return {part: self._reduced.get(part) for part in share}

    def forget(self) -> bool:
        """Drops reduced gradients, once they have all come; whether there were any reductions."""
        self._wait()
        had, self._sent = self._sent > 0, 0
        # Fresh memory costs a page fault per 4 KiB. That of whole parameters is autograd's.
        self._spare |= {
            part: total
            for part, total in self._reduced.items()
            if len(part.span) < self._parameters.params[part.tensor].numel()
        }
        self._reduced.clear()
        self._updated.clear()
        return had

    def reduce_now(self) -> None:
        """Reduces what is in ``param.grad``, all at once."""
        self._begin()
        self._send_rest()

    def shadow(self) -> None:
        """Takes part in a reduction with no gradients and not live; stops when no rank is."""
        for count, number in enumerate(self._training()):
            self._send(number, live=False)
            if count == 0:
                self._wait()
                if not self.live:
                    return
        self._sent += 1
        self._wait()

    # --- a backward pass ---------------------------------------------------------------------------

    def _training(self) -> list[int]:
        params = self._parameters.params
        return [
            number
            for number, bucket in enumerate(self._parameters.buckets)
            if any(params[n].requires_grad or params[n].grad is not None for n in bucket.params)
        ]

    def _begin(self) -> None:
        if self._sent:
            self._wait()
            if len(self.live) < self._communication.ranks:
                raise RuntimeError(
                    "in Join, gradients are reduced once per step: run all backward passes but the last in no_sync()"
                )
        self._announce()
        self._pending = self._training()
        params = self._parameters.params
        self._missing = {
            number: {n for n in self._parameters.buckets[number].params if params[n].requires_grad}
            for number in self._pending
        }

    def _arrived(self, number: int) -> None:
        if self._paused:
            return
        if self._pending is None:
            self._begin()
            # The engine's own way to be called when the whole backward pass is done; DDP uses it as well.
            torch.autograd.Variable._execution_engine.queue_callback(self._send_rest)
        assert self._pending is not None
        for missing in self._missing.values():
            missing.discard(number)
        while self._pending and not self._missing[self._pending[0]]:
            self._send(self._pending.pop(0), live=True)

    def _send_rest(self) -> None:
        pending, self._pending = self._pending or [], None
        self._sent += 1
        for number in pending:
            self._send(number, live=True)

    def _send(self, number: int, *, live: bool) -> None:
        bucket = self._parameters.buckets[number]
        gradients: dict[int, Tensor] = {}
        for n in bucket.params:
            param = self._parameters.params[n]
            if live and param.grad is not None:
                gradients[n] = flat_like(param.grad, param)
                param.grad = None
        reduce = partial(self._reduce, number, bucket, gradients, live=live)
        del gradients
        if self._worker is None:
            reduce()
            return
        self._room.acquire()
        job = self._worker.submit(reduce)
        job.add_done_callback(lambda _: self._room.release())
        self._jobs.append((number, job))

    def _wait(self) -> None:
        jobs, self._jobs = self._jobs, []
        for _, job in jobs:
            job.result()

    # --- one bucket, in the worker's thread --------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, number: int, bucket: Bucket, gradients: dict[int, Tensor], *, live: bool) -> None:
        communication = self._communication
        params = self._parameters.params
        header = torch.tensor([live, *(n in gradients for n in bucket.params)], dtype=torch.float32, device="cpu")
        by_rank = torch.stack(communication.exchange(header)())
        self.live = [rank for rank in range(communication.ranks) if by_rank[rank, 0]]
        had_gradient = dict(zip(bucket.params, by_rank[:, 1:].any(dim=0).tolist(), strict=True))
        if not any(had_gradient.values()):
            return
        count = len(self.live) if self.divide_by_live else communication.ranks
        for n in bucket.params:
            if n not in gradients:
                gradients[n] = torch.zeros(params[n].numel(), dtype=params[n].dtype, device=params[n].device)
        share = bucket.shares[communication.rank]
        own = {part.tensor: (part, self._total(part, gradients[part.tensor])) for part in share}
        if number not in self._parcels:
            self._parcels[number] = parcels_of(bucket.shares, params[bucket.params[0]].itemsize)

        def start(parcel: Parcel) -> Finish:
            if parcel.owner != communication.rank:
                return communication.add_up(parcel, gradients, ())
            totals = []
            for part in parcel.slices:
                whole, total = own[part.tensor]
                totals.append(total[part.span.start - whole.span.start : part.span.stop - whole.span.start])
            finish = communication.add_up(parcel, gradients, totals)

            def mean() -> None:
                finish()
                for total in totals:  # here, where it is still in the processor's cache
                    total.div_(count)

            return mean

        run_in_window(partial(start, parcel) for parcel in self._parcels[number])
        gradients.clear()
        self._updated.add(number)
        for part, total in own.values():
            if had_gradient[part.tensor]:
                before = self._reduced.get(part)
                self._reduced[part] = total if before is None else before.add_(total)

    def _total(self, part: Slice, gradient: Tensor) -> Tensor:
        """Where the sum of a slice goes: memory that does not keep the rest of the gradient alive."""
        if len(part.span) == gradient.numel():
            return gradient
        spare = self._spare.pop(part, None)
        return gradient.new_empty(len(part.span)) if spare is None else spare
