"""Gradients that are reduced here, to their owners; in a `Join` the count of live ranks travels with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from shoal.sharding.buffers import Buffers
from shoal.sharding.clipping import clip, unscale
from shoal.sharding.gradients import Gradients
from shoal.sharding.join import CountingJoinHook, Join, JoinHook, raise_if_joined
from shoal.sharding.lending import agree
from shoal.sharding.options import numbers_of, take_numbers
from shoal.sharding.partition import Slice
from shoal.sharding.reduction import Reduction
from shoal.sharding.shard import Shard

if TYPE_CHECKING:
    from shoal.sharding.zero import ZeroRedundancyOptimizer

# What the first live rank tells those that have joined to do with the reduced gradients.
STEP: Final = 0.0
CLIP: Final = 1.0
DROP: Final = 2.0
UNSCALE: Final = 3.0


class ReducedGradients(Gradients):
    """Reduces in every backward pass; all ranks begin with the parameters of rank 0.

    Args:
        zero: whose gradients.
        buffers: given to all ranks after every step, and at the start.
    """

    are_lent = True

    def __init__(self, zero: ZeroRedundancyOptimizer, buffers: Buffers) -> None:
        super().__init__(zero)
        self._buffers = buffers
        # To those that have joined, an iteration begins with the first bucket and not with the step.
        self.reduction = Reduction(zero._parameters, zero._communication, partial(_notify, weakref.ref(zero)))

    @torch.no_grad()
    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Gives the parameters of rank 0 to all, and reduces their gradients from now on."""
        self._zero._parameters.spread(self._zero._communication, groups)
        self._buffers.share(self._zero._communication, owner=0)
        self.reduction.watch()

    def prepare(self, shard: Shard) -> list[int]:
        """Waits for the reduced gradients."""
        gradients, updated = self._take()
        self._tell(STEP)
        shard.prepare(gradients)
        return updated

    def lend(self) -> None:
        """Nothing to do: those that have joined were told before."""

    def arriving(self, shard: Shard) -> Iterator[int]:
        """Gives gradients to the local optimizer bucket by bucket, as they come; gives the numbers of those buckets."""
        told = False
        for number in self.reduction.arriving():
            if not told:
                self._tell_step()
                told = True
            shard.prepare(self.reduction.of_bucket(number))
            yield number
        if not told:
            self._tell_step()

    def _tell_step(self) -> None:
        raise_if_joined(self._zero, len(self.reduction.live), self._zero.world_size)
        self._tell(STEP)

    def used(self) -> None:
        """Gives buffers to all ranks, and forgets gradients."""
        self._buffers.share(self._zero._communication, owner=self.reduction.live[0])
        self.reduction.forget()

    def drop(self) -> None:
        """Forgets what was reduced."""
        if self.reduction.forget():
            self._tell(DROP)

    def no_sync(self) -> AbstractContextManager[None]:
        """Lets gradients accumulate in ``param.grad``."""
        return self.reduction.paused()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Every rank its own, by the norm of all."""
        gradients, _ = self._take()
        self._tell(CLIP, max_norm, norm_type)
        return clip(gradients, max_norm, norm_type, self._zero._communication, self.norm_dtype)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Of the norm of all gradients: the widest of the parameters' dtypes, at least float32."""
        return reduce(torch.promote_types, {param.dtype for param in self._zero._all_params}, torch.float32)

    def unscale(self, factor: float) -> bool:
        """Multiplies them with ``factor``; whether all were finite before, on all ranks."""
        gradients, _ = self._take()
        self._tell(UNSCALE, factor)
        return unscale(gradients, factor, self._zero._communication)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Takes part in reductions, and in what follows.

        Args:
            kwargs: of `Join`; ``divide_by_initial_world_size`` (default True) is for this one.
        """
        self.reduction.divide_by_live = not kwargs.get("divide_by_initial_world_size", True)
        return CountingHook(self._zero, self)

    def _take(self) -> tuple[dict[Slice, Tensor | None], list[int]]:
        taken = self.reduction.take()
        raise_if_joined(self._zero, len(self.reduction.live), self._zero.world_size)
        return taken

    def _tell(self, what: float, first: float = 0.0, second: float = 0.0) -> None:
        """In a `Join`, the first live rank tells those that have joined what comes next, and its options."""
        zero, live = self._zero, self.reduction.live
        if zero._join_config.enable and live[0] == zero.rank:
            head = torch.tensor([what, first, second], dtype=torch.float64, device="cpu")
            for rank in set(range(zero.world_size)).difference(live):
                zero._communication.send_all(torch.cat([head, numbers_of(zero.param_groups)]), rank)

    def listen(self) -> tuple[float, float, float]:
        """On a rank that has joined: what the first live rank tells; takes its options."""
        zero = self._zero
        message = torch.cat([torch.zeros(3, dtype=torch.float64, device="cpu"), numbers_of(zero.param_groups)])
        zero._communication.receive_all(message, self.reduction.live[0])
        take_numbers(zero.param_groups, message[3:])
        what, first, second = message[:3].tolist()
        return what, first, second


def _notify(zero: weakref.ref[ZeroRedundancyOptimizer]) -> None:
    if (alive := zero()) is not None:
        Join.notify_join_context(alive)


class CountingHook(CountingJoinHook):
    """Shadows an iteration: the reduction, then what is done with the gradients.

    Args:
        zero: whose iterations.
        gradients: of the same optimizer.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, gradients: ReducedGradients) -> None:
        self._zero = zero
        self._gradients = gradients

    def shadow(self) -> int:
        """One iteration, with nothing to add. Returns how many ranks were live."""
        zero, reduction = self._zero, self._gradients.reduction
        with zero._failures.named("in Join"):
            self._gradients.drop()  # what this rank reduced last when it was live, and never stepped
            reduction.shadow()
            live = len(reduction.live)
            if live == 0 or zero._join_config.throw_on_early_termination:
                reduction.forget()
                return live
            while True:
                what, *numbers = self._gradients.listen()
                if what == DROP:
                    reduction.forget()
                    return live
                gradients, updated = reduction.take()
                if what == STEP:
                    zero._shadow(gradients, updated)
                    return live
                if what == UNSCALE:
                    unscale(gradients, numbers[0], zero._communication)
                else:
                    clip(gradients, numbers[0], numbers[1], zero._communication, self._gradients.norm_dtype)

    def post_hook(self, is_last_joiner: bool) -> None:
        """The mean is over all ranks again, and all have the options of one that joined last."""
        self._gradients.reduction.divide_by_live = False
        with self._zero._failures.named("leaving Join"):
            agree(self._zero._communication, self._zero.param_groups, was_last=is_last_joiner)
