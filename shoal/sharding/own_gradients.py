"""Gradients that are in ``param.grad``, equal on all ranks: `DistributedDataParallel` or the user has reduced them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.sharding.gradients import Gradients
from shoal.sharding.join import JoinHook
from shoal.sharding.lending import lend
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
        self._zero = zero

    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Nothing to do."""

    def prepare(self, shard: Shard) -> list[int]:
        """Gives each slice its part of ``param.grad``."""
        zero = self._zero
        if zero._join_config.enable:
            lend(zero._communication, zero._parameters, zero.param_groups, live=True)
        shard.prepare()
        return zero._parameters.updated()

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


class StepHook(JoinHook):
    """Shadows `step` on a rank that has joined.

    Args:
        zero: whose steps.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        """One step.

        Raises:
            RuntimeError: if a rank was lost, or none is live.
        """
        zero = self._zero
        with zero._failures.named("in Join"):
            lent = lend(zero._communication, zero._parameters, zero.param_groups, live=False)
            if lent is None:
                raise RuntimeError("a rank that has joined found no live one to learn from")
            zero._shadow(lent.gradients, lent.updated)
