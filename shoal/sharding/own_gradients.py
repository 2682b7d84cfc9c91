"""Gradients that are in ``param.grad``, equal on all ranks: `DistributedDataParallel` or the user has reduced them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.sharding.communication import Finish
from shoal.sharding.gradients import Gradients
from shoal.sharding.join import JoinHook, LendingJoinHook, all_live_of
from shoal.sharding.lending import agree, borrow, lend
from shoal.sharding.reduction import take_from_others
from shoal.sharding.shard import Shard

if TYPE_CHECKING:
    from shoal.sharding.zero import ZeroRedundancyOptimizer


class OwnGradients(Gradients):
    """Nothing but in a `Join`, where the first live rank lends its gradients to those that have joined.

    Args:
        zero: whose gradients.
    """

    are_lent = False

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        super().__init__(zero)
        self._lending: Finish | None = None

    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Takes the parameters from optimizers that would take their gradients away."""
        take_from_others((param for group in groups for param in group), None)

    def prepare(self, shard: Shard) -> list[int]:
        """Gives each slice its part of ``param.grad``."""
        zero = self._zero
        if zero._join_config.enable:
            self._lending = lend(zero._communication, zero._parameters, zero.param_groups, all_live_of(zero))
        shard.prepare()
        return zero._parameters.updated()

    def lend(self) -> None:
        """In a `Join`, gives options and gradients to those that have joined."""
        lending, self._lending = self._lending, None
        if lending is not None:
            lending()

    def used(self) -> None:
        """Nothing to do."""

    def drop(self) -> None:
        """Nothing to do."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: it is DDP that synchronises."""
        return nullcontext()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """As torch's, since every rank has all gradients."""
        return torch.nn.utils.clip_grad_norm_(self._zero._all_params, max_norm, norm_type)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Steps with what the live ranks lend."""
        return StepHook(self._zero)


class AgreeingHook(LendingJoinHook):
    """Shadows nothing; when all have joined, all have the options of one that joined last.

    Args:
        zero: whose options.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes the options."""
        with self._zero._failures.named("leaving Join"):
            agree(self._zero._communication, self._zero.param_groups, was_last=is_last_joiner)


class StepHook(AgreeingHook):
    """Shadows `step` on a rank that has joined."""

    def main_hook(self) -> None:
        """One step.

        Raises:
            RuntimeError: if a rank was lost, or none is live.
        """
        zero = self._zero
        with zero._failures.named("in Join"):
            lent = borrow(zero._communication, zero._parameters, zero.param_groups)
            if lent is None:
                raise RuntimeError("a rank that has joined found no live one to learn from")
            zero._shadow(lent.gradients, lent.updated)
