"""Gradients that Shoal reduces, to their owners. In a `Join` the count of live ranks travels with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from shoal.sharding.clipping import norm_of, scale_to, unscale
from shoal.sharding.gradient_source import GradientSource
from shoal.sharding.join import CountingJoinHook, JoinHook
from shoal.sharding.lending import agree
from shoal.sharding.module_buffers import ModuleBuffers
from shoal.sharding.option_numbers import numbers_of, take_numbers
from shoal.sharding.partition import Slice
from shoal.sharding.reduction import Reduction
from shoal.sharding.sharded_step import ShardedStep

# What the joined ranks must do with the reduced gradients; the first live rank tells them.
STEP: Final = 0.0
CLIP: Final = 1.0
DROP: Final = 2.0
UNSCALE: Final = 3.0
CLIP_FINITE: Final = 4.0  # only if the norm is finite


class ReducedGradients(GradientSource):
    """Reduces gradients in every backward pass. All ranks begin with the parameters of rank 0.

    Args:
        step: the sharded step of the optimizer.
        buffers: module buffers to send to all ranks at the start and after every step.

    Attributes:
        reduction: the object that reduces.
    """

    are_lent = True

    def __init__(self, step: ShardedStep, buffers: ModuleBuffers) -> None:
        self._step = step
        self._buffers = buffers
        # For joined ranks an iteration begins with the first bucket, not with the step.
        self.reduction = Reduction(step.parameters, step.communication, step.notify_join)

    @torch.no_grad()
    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Sends the parameters of rank 0 to all ranks, and reduces their gradients from now on."""
        self._step.parameters.spread(self._step.communication, groups)
        self._buffers.share(self._step.communication, owner=0)
        self.reduction.watch()

    def prepare(self) -> list[int]:
        """Waits for the reduced gradients."""
        gradients, updated = self._take()
        self._tell(STEP)
        self._step.shard.prepare(gradients)
        return updated

    def lend(self) -> None:
        """Nothing to do: joined ranks got options and gradients before."""

    def arriving(self) -> Iterator[int]:
        """Gives gradients to the local optimizer bucket by bucket, as they arrive; yields the buckets' numbers."""
        told = False
        for number in self.reduction.arriving():
            if not told:
                self._tell_step()
                told = True
            self._step.shard.prepare(self.reduction.of_bucket(number))
            yield number
        if not told:
            self._tell_step()

    def _tell_step(self) -> None:
        self._step.raise_if_joined(len(self.reduction.live))
        self._tell(STEP)

    def used(self) -> None:
        """Sends buffers to all ranks, and drops the gradients."""
        self._buffers.share(self._step.communication, owner=self.reduction.live[0])
        self.reduction.forget()

    def drop(self) -> None:
        """Drops the reduced gradients."""
        if self.reduction.forget():
            self._tell(DROP)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients accumulate in ``param.grad``."""
        return self.reduction.paused()

    def clip(self, max_norm: float, norm_type: float, *, only_finite: bool) -> Tensor:
        """Each rank scales its own gradients, by the norm of all gradients."""
        gradients, _ = self._take()
        self._tell(CLIP_FINITE if only_finite else CLIP, max_norm, norm_type)
        return self.clip_taken(gradients, max_norm, norm_type, only_finite=only_finite)

    def clip_taken(
        self, gradients: Mapping[Slice, Tensor | None], max_norm: float, norm_type: float, *, only_finite: bool
    ) -> Tensor:
        """As `clip`, with the gradients that this rank has taken."""
        params, communication = self._step.parameters.params, self._step.communication
        norm = norm_of(gradients, norm_type, communication, params)
        if not only_finite or norm.isfinite():
            scale_to(gradients, max_norm, norm)
        return norm

    def unscale(self, factor: float) -> bool:
        """Multiplies the gradients by ``factor``; returns whether all were finite before, on all ranks."""
        gradients, _ = self._take()
        self._tell(UNSCALE, factor)
        return unscale(gradients, factor, self._step.communication)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that takes part in reductions and in the steps after them.

        Args:
            kwargs: the arguments of `Join`; this hook reads ``divide_by_initial_world_size`` (default True).
        """
        self.reduction.divide_by_live = not kwargs.get("divide_by_initial_world_size", True)
        return CountingHook(self._step, self)

    def _take(self) -> tuple[dict[Slice, Tensor | None], list[int]]:
        taken = self.reduction.take()
        self._step.raise_if_joined(len(self.reduction.live))
        return taken

    def _tell(self, what: float, first: float = 0.0, second: float = 0.0) -> None:
        """In a `Join`, on the first live rank: tells joined ranks what to do next, and sends them its options."""
        step, live = self._step, self.reduction.live
        communication = step.communication
        if step.join_config.enable and live[0] == communication.rank:
            head = torch.tensor([what, first, second], dtype=torch.float64, device="cpu")
            for rank in set(range(communication.ranks)).difference(live):
                communication.send_all(torch.cat([head, numbers_of(step.groups)]), rank)

    def listen(self) -> tuple[float, float, float]:
        """On a joined rank: receives the instruction of the first live rank, and takes its options."""
        step = self._step
        message = torch.cat([torch.zeros(3, dtype=torch.float64, device="cpu"), numbers_of(step.groups)])
        step.communication.receive_all(message, self.reduction.live[0])
        take_numbers(step.groups, message[3:])
        what, first, second = message[:3].tolist()
        return what, first, second


class CountingHook(CountingJoinHook):
    """Shadows an iteration: the reduction, then the operations on the gradients.

    Args:
        step: the sharded step of the optimizer.
        gradients: the gradients of the same optimizer.
    """

    def __init__(self, step: ShardedStep, gradients: ReducedGradients) -> None:
        self._step = step
        self._gradients = gradients

    def shadow(self) -> int:
        """Takes part in one iteration and adds nothing. Returns how many ranks were live."""
        step, reduction = self._step, self._gradients.reduction
        with step.failures.named("in Join"):
            self._gradients.drop()  # gradients that this rank reduced while it was live, and never stepped with
            reduction.shadow()
            live = len(reduction.live)
            if live == 0 or step.join_config.throw_on_early_termination:
                reduction.forget()
                return live
            while True:
                what, *numbers = self._gradients.listen()
                if what == DROP:
                    reduction.forget()
                    return live
                gradients, updated = reduction.take()
                if what == STEP:
                    step.shadow(gradients, updated, drop_gradients=True)
                    self._gradients.used()
                    return live
                if what == UNSCALE:
                    unscale(gradients, numbers[0], step.communication)
                else:
                    self._gradients.clip_taken(gradients, *numbers, only_finite=what == CLIP_FINITE)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Divides by the number of all ranks again; all ranks take the options of a rank that joined last."""
        self._gradients.reduction.divide_by_live = False
        with self._step.failures.named("leaving Join"):
            agree(self._step.communication, self._step.groups, was_last=is_last_joiner)
