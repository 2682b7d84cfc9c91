"""Gradients in ``param.grad``, equal on all ranks because `DistributedDataParallel` or the user has reduced them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.sharding.communication import Finish
from shoal.sharding.gradient_source import GradientSource
from shoal.sharding.join import JoinHook, LendingJoinHook
from shoal.sharding.lending import agree, borrow, lend
from shoal.sharding.reduction import take_from_others
from shoal.sharding.sharded_step import ShardedStep


class ReplicatedGradients(GradientSource):
    """Communicates in a `Join` only. There the first live rank lends its gradients to the ranks that have joined.

    Args:
        step: the sharded step of the optimizer.
    """

    are_lent = False

    def __init__(self, step: ShardedStep) -> None:
        self._step = step
        self._lending: Finish | None = None

    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Takes the parameters from optimizers that would remove their gradients."""
        take_from_others((param for group in groups for param in group), None)

    def prepare(self) -> list[int]:
        """Gives each slice its part of ``param.grad``."""
        step = self._step
        if step.join_config.enable:
            self._lending = lend(step.communication, step.parameters, step.groups, step.all_live)
        step.shard.prepare()
        return step.parameters.updated()

    def lend(self) -> None:
        """In a `Join`, gives options and gradients to the ranks that have joined."""
        lending, self._lending = self._lending, None
        if lending is not None:
            lending()

    def used(self) -> None:
        """Nothing to do."""

    def drop(self) -> None:
        """Nothing to do."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: DDP synchronises gradients."""
        return nullcontext()

    def clip(self, max_norm: float, norm_type: float, *, only_finite: bool) -> Tensor:
        """Calls torch's functions, because every rank has all gradients."""
        params = self._step.parameters.params
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        if not only_finite or norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that steps with the options and gradients that the live ranks lend."""
        return StepHook(self._step)


class AgreeingHook(LendingJoinHook):
    """Shadows nothing. When all ranks have joined, all take the options of one that joined last.

    Args:
        step: the sharded step of the optimizer.
    """

    def __init__(self, step: ShardedStep) -> None:
        self._step = step

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes the options."""
        with self._step.failures.named("leaving Join"):
            agree(self._step.communication, self._step.groups, was_last=is_last_joiner)


class StepHook(AgreeingHook):
    """Shadows `step` on a rank that has joined."""

    def main_hook(self) -> None:
        """Makes one step.

        Raises:
            RuntimeError: if a rank was lost, or none is live.
        """
        step = self._step
        with step.failures.named("in Join"):
            lent = borrow(step.communication, step.parameters, step.groups)
            if lent is None:
                raise RuntimeError("a rank that has joined found no live one to learn from")
            step.shadow(lent.gradients, lent.updated, drop_gradients=False)
