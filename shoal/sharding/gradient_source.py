"""Where the gradients for a step come from: the interface of `ReplicatedGradients` and `ReducedGradients`."""

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
        are_lent: whether they belong to the step alone, and go with it; else they are ``param.grad``, and stay.
    """

    are_lent: ClassVar[bool]

    @abstractmethod
    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Takes the parameters of new groups. Communicates."""

    @abstractmethod
    def prepare(self) -> list[int]:
        """Gives the local optimizer its gradients; returns the buckets that the step may change, on any rank."""

    @abstractmethod
    def lend(self) -> None:
        """After the local step, before the parameters go to all ranks: gives joined ranks what they step with."""

    @abstractmethod
    def used(self) -> None:
        """The step is done."""

    @abstractmethod
    def drop(self) -> None:
        """Forgets gradients that are not in ``param.grad``."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Lets backward passes accumulate."""

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scales the gradients so that their norm is at most ``max_norm``; returns the norm before."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What shadows the steps on a rank that has joined."""
