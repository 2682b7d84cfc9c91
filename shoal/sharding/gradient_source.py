"""The source of the gradients for a step: the interface of `ReplicatedGradients` and `ReducedGradients`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor

from shoal.sharding.join import JoinHook


class GradientSource(ABC):
    """The gradients of one `ZeroRedundancyOptimizer`.

    Attributes:
        are_lent: True if the gradients belong to the step alone and are dropped after it. False if they are
            ``param.grad`` and stay.
    """

    are_lent: ClassVar[bool]

    @abstractmethod
    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Adds the parameters of new groups. Communicates."""

    @abstractmethod
    def prepare(self) -> list[int]:
        """Gives the local optimizer its gradients. Returns the numbers of the buckets that the step may change, on any
        rank.
        """

    @abstractmethod
    def lend(self) -> None:
        """Called after the local step and before the parameters go to all ranks: gives joined ranks their options and
        gradients.
        """

    @abstractmethod
    def used(self) -> None:
        """Called when the step is done."""

    @abstractmethod
    def drop(self) -> None:
        """Drops gradients that are not in ``param.grad``."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients."""

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float, *, only_finite: bool) -> Tensor:
        """Scales the gradients so that their norm is at most ``max_norm``; returns the norm before.

        Args:
            max_norm, norm_type: as for torch's ``clip_grad_norm_``.
            only_finite: leave the gradients as they are if the norm is not finite.
        """

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that shadows the steps on a rank that has joined."""
