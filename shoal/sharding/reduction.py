"""Reduces gradients to their owners only, bucket by bucket while backward runs (ZeRO-2).

When backward has finished the gradients of a bucket, this rank takes them from the parameters (``param.grad`` is None
again) and sends them to the ranks that own them, which add them up. So a rank keeps the gradients of its own share, and
of a few buckets under way. All ranks send the buckets in the same order. A parameter without a gradient on this rank
counts as zero. If no rank has a gradient for it, it is left alone, as torch.optim does.

With each bucket goes a header: whether this rank is live (see `Join`), and which parameters had a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import BoundedSemaphore
from typing import Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.sharding._torch import call_after_backward
from shoal.sharding.arrivals import Arrivals
from shoal.sharding.communication import Communication, Finish, run_in_window
from shoal.sharding.flat_views import flat_like
from shoal.sharding.parameters import Parameters
from shoal.sharding.partition import Bucket, Parcel, Slice, parcels_of
from shoal.sharding.worker import Worker

BUCKETS_UNDER_WAY: Final = 3
"""Backward waits when it is this many buckets ahead, which bounds the memory of gradients."""

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each parameter, a weak reference to the `Reduction` that takes its gradients."""


def take_from_others(params: Iterable[Tensor], owner: Reduction | None) -> None:
    """Ends all other reductions that take gradients of these parameters: the newest optimizer of a parameter gets them.

    All ranks agree on which optimizer is the newest. They may differ in which of the others are garbage already.

    Args:
        params: the parameters of the newest optimizer.
        owner: its reduction; None if it leaves gradients in ``param.grad``.
    """
    for param in params:
        other = _owners[param]() if param in _owners else None
        if other is not None and other is not owner:
            other.retire(param)
        if owner is not None:
            _owners[param] = weakref.ref(owner)
        elif param in _owners:
            del _owners[param]


class Reduction:
    """Reduces the gradients of all parameters to their owners, in every backward pass from now on.

    Args:
        parameters: the parameters.
        communication: the messages of the process group.
        announce: called before the first message of a backward pass.

    Attributes:
        divide_by_live: divide sums by the number of live ranks, instead of the number of all ranks.
        live: the ranks that had inputs of their own in the last reduction.
    """

    def __init__(self, parameters: Parameters, communication: Communication, announce: Callable[[], object]) -> None:
        self._announce = announce
        self.divide_by_live = False
        self.live = list(range(communication.ranks))
        self._parameters = parameters
        self._communication = communication
        self._worker = Worker() if communication.by_messages else None
        communication.send_from_thread()
        self._room = BoundedSemaphore(BUCKETS_UNDER_WAY)
        self._jobs: list[tuple[int, Future[None]]] = []  # (number of the bucket, its job)
        self._arrivals: list[Arrivals] = []  # by bucket
        # by bucket: which parameters had gradients on which rank, in the last reduction
        self._used: dict[int, bytes] = {}
        self._changed: set[int] = set()  # buckets where `_used` has changed
        self._retired = ""
        self._paused = False
        self._sent = 0  # reductions since the last take()
        self._pending: list[int] | None = None  # buckets that the current backward pass must still send
        self._parcels: dict[int, list[Parcel]] = {}
        self._reduced: dict[Slice, Tensor] = {}
        self._spare: dict[Slice | int, Tensor] = {}  # memory for gradients of parts of parameters, and of parcels
        self._packed: dict[Slice | int, Tensor] = {}  # gradients of several parameters, by the parcel that brought them
        self._updated: set[int] = set()
        # Without this, torch would call the hooks of a dead reduction for as long as the parameters live.
        weakref.finalize(self, _unhook, self._arrivals).atexit = False
        self.watch()

    def watch(self) -> None:
        """Hooks into the backward pass of new parameters."""
        params, buckets = self._parameters.params, self._parameters.buckets
        new = [number for bucket in buckets[len(self._arrivals) :] for number in bucket.params]
        take_from_others([params[number] for number in sorted(new)], self)
        for number in range(len(self._arrivals), len(buckets)):
            tell = partial(_tell, weakref.ref(self), number)
            self._arrivals.append(Arrivals({n: params[n] for n in buckets[number].params}, tell))
            self._arrivals[number].hook_all()

    def retire(self, param: Tensor) -> None:
        """Another optimizer takes the gradients of ``param`` from now on. Any further use of this one raises."""
        if self._retired:
            return
        number = next(n for n, own in enumerate(self._parameters.params) if own is param)
        self._retired = (
            f"a newer ZeroRedundancyOptimizer has taken over parameter {number}, of shape {tuple(param.shape)}: "
            "use that one, and drop this one"
        )
        _unhook(self._arrivals)

    def _check(self) -> None:
        """Raises if a step would use none, or not all, of the gradients of the last backward pass."""
        if self._retired:
            raise RuntimeError(self._retired)
        if not self._sent:
            return
        for number, param in enumerate(self._parameters.params):
            if param.grad is not None:
                raise RuntimeError(
                    f"parameter {number}, of shape {tuple(param.shape)}, has a gradient that came when those of its "
                    "backward pass had been sent: accumulate in no_sync(), set no .grad before or after a backward "
                    "pass, and checkpoint with use_reentrant=False"
                )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which gradients accumulate in ``param.grad``. The next backward pass outside sends the sums."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            if not before:
                for arrivals in self._arrivals:
                    arrivals.remember_sums()

    def take(self) -> tuple[dict[Slice, Tensor | None], list[int]]:
        """Waits for the reduced gradients of this rank's share. Returns them and the buckets where any rank had
        gradients.

        If no backward pass has reduced gradients since the last step, this reduces those in ``param.grad``. The
        gradients are kept until :meth:`forget`.
        """
        self._end_pass()
        self._check()
        if not self._sent:
            self.reduce_now()
        self._wait()
        return dict(self._reduced), sorted(self._updated)

    def arriving(self) -> Iterator[int]:
        """As :meth:`take`, bucket by bucket: yields the number of each bucket that had gradients on any rank, once it
        is reduced.
        """
        self._end_pass()
        self._check()
        if not self._sent:
            self.reduce_now()
        if self._sent > 1 or not self._jobs:  # the sum of several reductions, or complete already
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
        """Drops reduced gradients, after all have come; returns whether there were any reductions."""
        self._end_pass()
        self._wait()
        had, self._sent = self._sent > 0, 0
        # Fresh memory costs a page fault per 4 KiB, so memory is reused. The memory of whole parameters belongs to
        # autograd.
        self._spare |= {
            part: total
            for part, total in self._reduced.items()
            if len(part.span) < self._parameters.params[part.tensor].numel()
        }
        self._spare |= self._packed
        self._packed.clear()
        self._reduced.clear()
        self._updated.clear()
        if had:
            self._move_hooks()
        return had

    def _move_hooks(self) -> None:
        # If all ranks have gradients of the same parameters in each pass, one hook per bucket is enough. If not, a pass
        # may use none of the hooked parameters, and its gradients would be sent with those of the next pass.
        for number, arrivals in enumerate(self._arrivals):
            if number in self._changed:
                arrivals.hook_all()
            else:
                arrivals.hook_last()
        self._changed.clear()

    def reduce_now(self) -> None:
        """Reduces the gradients in ``param.grad``, all at once."""
        self._begin()
        self._send_rest()

    def shadow(self) -> None:
        """Takes part in a reduction as a joined rank, without gradients. Stops if no rank is live."""
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
        for arrivals in self._arrivals:
            arrivals.begin()

    def arrived(self, bucket: int, number: int) -> None:
        """Called by the hook of a parameter of a bucket, in the backward pass."""
        if self._paused:
            return
        if self._pending is None:
            self._begin()
            call_after_backward(self._send_rest)
        assert self._pending is not None
        self._arrivals[bucket].came(number)
        while self._pending and self._arrivals[self._pending[0]].complete:
            self._send(self._pending.pop(0), live=True)

    def _end_pass(self) -> None:
        """After a backward pass that raised, autograd does not call back at its end. Sends the rest, for which other
        ranks wait.
        """
        if self._pending is not None:
            self._send_rest()

    def _send_rest(self) -> None:
        pending, self._pending = self._pending or [], None
        self._sent += 1
        for number in pending:
            self._send(number, live=True)
        for arrivals in self._arrivals:
            arrivals.forget_sums()

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
        used = bytes(by_rank[:, 1:].bool().flatten().tolist())
        if self._used.setdefault(number, used) != used:
            self._used[number] = used
            self._changed.add(number)
        had_gradient = dict(zip(bucket.params, by_rank[:, 1:].any(dim=0).tolist(), strict=True))
        if not any(had_gradient.values()):
            return
        count = len(self.live) if self.divide_by_live else communication.ranks
        for n in bucket.params:
            if n not in gradients:
                gradients[n] = torch.zeros(params[n].numel(), dtype=params[n].dtype, device=params[n].device)
        if number not in self._parcels:
            self._parcels[number] = parcels_of(bucket.shares, params[bucket.params[0]].itemsize)
        own: dict[Slice, Tensor] = {}
        large = {part.tensor: part for part in bucket.shares[communication.rank]}

        def start(parcel: Parcel) -> Finish:
            if parcel.owner != communication.rank:
                return communication.add_up(parcel, gradients, None)
            if len(parcel.slices) > 1:
                total = self._spare.pop(id(parcel), None)
                if total is None:
                    total = gradients[parcel.slices[0].tensor].new_empty(parcel.numel)
                self._packed[id(parcel)] = total
                own.update(
                    zip(parcel.slices, torch.split(total, [len(part.span) for part in parcel.slices]), strict=True)
                )
            else:
                (part,) = parcel.slices
                whole = large[part.tensor]
                if whole not in own:
                    own[whole] = self._total(whole, gradients[whole.tensor])
                total = own[whole][part.span.start - whole.span.start : part.span.stop - whole.span.start]
            finish = communication.add_up(parcel, gradients, total)

            def mean() -> None:
                finish()
                total.div_(count)  # here, while it is still in the processor's cache

            return mean

        run_in_window(partial(start, parcel) for parcel in self._parcels[number])
        own |= {part: gradients[part.tensor] for part in large.values() if not part.span}
        gradients.clear()
        self._updated.add(number)
        for part, total in own.items():
            if had_gradient[part.tensor]:
                before = self._reduced.get(part)
                self._reduced[part] = total if before is None else before.add_(total)

    def _total(self, part: Slice, gradient: Tensor) -> Tensor:
        """Memory for the sum of a slice, which does not keep the rest of the gradient alive."""
        if len(part.span) == gradient.numel():
            return gradient
        spare = self._spare.pop(part, None)
        return gradient.new_empty(len(part.span)) if spare is None else spare


def _tell(reduction: weakref.ref[Reduction], bucket: int, number: int) -> None:
    if (alive := reduction()) is not None:
        alive.arrived(bucket, number)


def _unhook(arrivals: list[Arrivals]) -> None:
    for one in arrivals:
        one.unhook()
