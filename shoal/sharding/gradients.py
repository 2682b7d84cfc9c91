"""Where the gradients for a step come from: the interface of `OwnGradients` and `ReducedGradients`."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from shoal.sharding.join import JoinHook
from shoal.sharding.shard import Shard

if TYPE_CHECKING:
    from shoal.sharding.zero import ZeroRedundancyOptimizer


class Gradients(ABC):
    """The gradients of one `ZeroRedundancyOptimizer`.

    Attributes:
        are_lent: whether they belong to the step alone, and go with it; else they are ``param.grad``, and stay.
    """

    are_lent: ClassVar[bool]

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        # Weak, so that the optimizer goes with its last reference, and its hooks with it, and not when somebody
        # collects garbage.
        self._owner = weakref.ref(zero)

    @property
    def _zero(self) -> ZeroRedundancyOptimizer:
        zero = self._owner()
        assert zero is not None
        return zero

    @abstractmethod
    def watch(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Takes note of the parameters of new groups. Communicates."""

    @abstractmethod
    def prepare(self, shard: Shard) -> list[int]:
        """Gives the gradients to the local optimizer; returns the buckets that the step may change, on any rank."""

    @abstractmethod
    def lend(self) -> None:
        """After the local step, before the parameters go to all ranks: helps those that have joined to theirs."""

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
        """Scales them so that their norm is at most ``max_norm``; returns the norm before."""

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What shadows the steps on a rank that has joined."""
