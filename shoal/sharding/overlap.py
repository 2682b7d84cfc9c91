"""Stepping inside DDP's backward pass: communication hooks that step each bucket once its gradients are reduced.

This file does without ``from __future__ import annotations``, because DDP compares a hook's annotations with types.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.sharding._torch import in_backward, join_config_of, mark_as_stepped
from shoal.sharding.communication import OVERLAP, Finish
from shoal.sharding.flat_views import flat, flat_like
from shoal.sharding.option_numbers import numbers_of, take_numbers
from shoal.sharding.partition import Parcel, parcels_of
from shoal.sharding.shard import Piece, follow
from shoal.sharding.zero import ZeroRedundancyOptimizer

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A communication hook for ``ddp`` that reduces gradients by ``hook``, and steps ``zero`` at the end of backward.

    The hook steps the buckets in the order of their reductions. While it steps a bucket, the parameters of earlier
    buckets are on their way to the other ranks. ``zero.step()`` then does nothing and need not be called. The hook
    works on every backend and from the first backward pass on. Options may change between passes.

    Every parameter in DDP's buckets is stepped. One that a pass does not use has a gradient of zero, with
    ``find_unused_parameters`` too. Every backward pass makes a step, so accumulate gradients in ``ddp.no_sync()``. In a
    `Join` of the model, with or without the optimizer in its list, joined ranks step their share with the others.

    Args:
        hook: reduces one bucket, as ``allreduce_hook`` and other hooks of ``torch.distributed`` do.
        ddp: the model on which the result is to be registered, by ``ddp.register_comm_hook(None, …)``.
        zero: an optimizer made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility with torch's function. Buckets are divided over all ranks in any case.

    Returns:
        The hook.

    Raises:
        ValueError: if ``zero`` was made without ``overlap_with_ddp``, or for another process group, or if the model has
            complex parameters, or an embedding that makes sparse gradients.
    """
    overlap = _Overlap(zero, ddp)
    reductions: list[tuple[dist.GradBucket, Future[Any]]] = []

    def reduce(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        future = hook(state, bucket)
        if bucket.index() == 0:
            reductions.clear()
        reductions.append((bucket, future))
        if bucket.is_last():
            for one, reduced in reductions:
                overlap.step(one, reduced.wait(), live=in_backward())
            reductions.clear()
        return future

    return reduce


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """As `hook_with_zero_step`, but steps each bucket as soon as it is reduced, while backward goes on.

    Use this one if communication is fast and processors are idle during backward, and `hook_with_zero_step` if not.
    Arguments, result and errors are the same.
    """
    overlap = _Overlap(zero, ddp)

    def reduce(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        live = in_backward()
        return hook(state, bucket).then(lambda reduced: overlap.step(bucket, reduced.wait(), live=live))

    return reduce


class _Overlap:
    """One step, bucket by bucket, in whatever order and on whatever thread their reductions end."""

    def __init__(self, zero: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> None:
        if not zero.overlap_with_ddp:
            raise ValueError("make the ZeroRedundancyOptimizer with overlap_with_ddp=True to step it in a hook of DDP")
        if ddp.process_group != zero.process_group:
            raise ValueError("the model and its ZeroRedundancyOptimizer are of different process groups")
        for name, param in ddp.module.named_parameters():
            if param.is_complex():  # torch 2.13's GradBucket.gradients() gives the first half of the pairs
                raise ValueError(
                    f"{name!r} is complex, and the buckets of DDP hold pairs of real numbers: keep such pairs in a "
                    "real parameter (torch.view_as_real), or make the optimizer without overlap_with_ddp"
                )
        for name, module in ddp.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:  # as DDP looks for them
                raise ValueError(
                    f"{name!r} makes sparse gradients, and a step in DDP's backward pass needs dense ones: "
                    "give it sparse=False, or make the optimizer without overlap_with_ddp"
                )
        self._zero, self._ddp = zero, ddp
        self._sharded = zero.sharded_step
        self._lock = Lock()
        self._buckets: int | None = None  # number of buckets of this pass, once the last is known
        self._stepped = 0
        self._sending: list[Finish] = []
        self._parcels: dict[tuple[int, ...], list[Parcel]] = {}

    def step(self, bucket: dist.GradBucket, reduced: Any, *, live: bool) -> Tensor:
        """Steps the parameters of a bucket with its reduced gradients. The last bucket waits until all ranks have all
        parameters.

        Args:
            bucket: a bucket of DDP.
            reduced: the result of its reduction.
            live: whether this rank has inputs of its own. Ranks without inputs take the options of those that have some
                (see `Join`).
        """
        buffer = bucket.buffer()
        result: Tensor = reduced if isinstance(reduced, Tensor) else reduced[0]
        with self._lock, torch.no_grad(), self._sharded.failures.named("stepping in the backward pass of DDP"):
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result.view_as(buffer))
            if bucket.is_last():
                self._buckets = bucket.index() + 1
            if self._stepped == 0 and (join_config_of(self._ddp).enable or self._sharded.join_config.enable):
                self._follow_live(live)
            self._stepped += 1
            try:
                self._step(bucket)
            finally:
                if self._stepped == self._buckets:
                    sending, self._sending = self._sending, []
                    self._buckets, self._stepped = None, 0
                    for finish in sending:
                        finish()
                    self._sharded.shard.settle()
        return result

    def _follow_live(self, live: bool) -> None:
        groups = self._sharded.groups
        header = torch.cat([torch.tensor([live], dtype=torch.float64, device="cpu"), numbers_of(groups)])
        headers = self._sharded.communication.exchange(header)()
        if not live:
            take_numbers(groups, next(other for other in headers if other[0])[1:])

    def _step(self, bucket: dist.GradBucket) -> None:
        sharded = self._sharded
        params, shard = sharded.parameters.params, sharded.shard
        sharded.take_options()
        sharded.consolidated = None
        numbers = {id(param): number for number, param in enumerate(params)}
        gradients = {
            numbers[id(param)]: gradient
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if id(param) in numbers
        }
        pieces: list[Piece] = [piece for piece in shard.all_pieces if piece.part.tensor in gradients]
        follow(pieces)
        for piece in pieces:
            gradient = flat_like(gradients[piece.part.tensor], piece.param)
            piece.take_gradient(gradient[piece.part.span.slice])
        shard.optimizer.step()
        for piece in pieces:
            piece.write_back()
            piece.local.grad = None
        sharded.show_options()
        mark_as_stepped(self._zero)

        chosen = tuple(sorted(gradients))
        if chosen not in self._parcels:
            self._parcels[chosen] = self._parcels_for(set(chosen))
        tensors = {number: flat(params[number]) for number in chosen}
        # Each bucket has its own tag, because reductions may end in another order on another rank.
        tag = OVERLAP + bucket.index()
        self._sending += [sharded.communication.share(parcel, tensors, tag) for parcel in self._parcels[chosen]]

    def _parcels_for(self, chosen: set[int]) -> list[Parcel]:
        parameters = self._sharded.parameters
        shares = [
            tuple(
                part
                for bucket in parameters.buckets
                for part in bucket.shares[rank]
                if part.tensor in chosen and part.span
            )
            for rank in range(self._sharded.communication.ranks)
        ]
        return parcels_of(shares, parameters.params[next(iter(chosen))].itemsize) if chosen else []
