"""The state that all parts of one `ZeroRedundancyOptimizer` share, and the parts of a step that are common to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from shoal.flat import ShowsGroups
from shoal.sharding._torch import JoinConfig, join_config_of
from shoal.sharding.communication import Communication
from shoal.sharding.failures import Failures
from shoal.sharding.join import Join, all_live_of, raise_if_joined
from shoal.sharding.option_numbers import Groups, copy_options
from shoal.sharding.parameters import Parameters
from shoal.sharding.partition import Slice
from shoal.sharding.shard import Shard


class JoinableOptimizer(ShowsGroups, Joinable):
    """An optimizer that can be in a `Join`, and that takes its options from `param_groups` at each step."""

    def checked_groups(self) -> Groups:
        """The parameter groups that users see. Raises ValueError as `Shown.check`."""
        if self._shown is not None:
            self._shown.check()
        return self.param_groups


class ShardedStep:
    """The division of one optimizer over the ranks, and the steps of this rank's share.

    Args:
        optimizer: the optimizer whose groups, options and `Join` are used. Only a weak reference is kept, so the
            optimizer and its hooks are freed with its last reference, without waiting for the garbage collector.
        communication: messages among the ranks.
        failures: names the rank that fails.
        parameters: all parameters, and which rank owns which elements.
        shard: this rank's share.

    Attributes:
        communication, failures, parameters, shard: as given.
        consolidated: the state of all parameters, on the rank that has collected it; None after the next step.
    """

    def __init__(
        self,
        optimizer: JoinableOptimizer,
        communication: Communication,
        failures: Failures,
        parameters: Parameters,
        shard: Shard,
    ) -> None:
        self._owner = weakref.ref(optimizer)
        self.communication = communication
        self.failures = failures
        self.parameters = parameters
        self.shard = shard
        self.consolidated: dict[int, dict[str, Any]] | None = None

    @property
    def _optimizer(self) -> JoinableOptimizer:
        optimizer = self._owner()
        assert optimizer is not None
        return optimizer

    @property
    def groups(self) -> Groups:
        """The parameter groups that users see."""
        return self._optimizer.param_groups

    # --- steps -------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Takes over what user code has changed since the last step: options, and where parameters lie."""
        self.consolidated = None
        self.parameters.follow()
        self.shard.follow()
        self.take_options()

    def take_options(self) -> None:
        """Gives the local optimizer the options that users see."""
        copy_options(self._optimizer.checked_groups(), self.shard.optimizer.param_groups)

    def show_options(self) -> None:
        """Gives users the options of the local optimizer, which its step may have changed."""
        copy_options(self.shard.optimizer.param_groups, self.groups)

    def gather(self, updated: Iterable[int]) -> None:
        """Sends the parameters of some buckets from their owners to all ranks.

        Args:
            updated: the numbers of the buckets, equal on all ranks. An iterator may update each bucket just before it
                yields its number.
        """
        with torch.no_grad():
            self.parameters.gather(self.communication, updated)
        self.shard.settle()

    def shadow(self, gradients: Mapping[Slice, Tensor | None], updated: list[int], *, drop_gradients: bool) -> None:
        """Makes the step of a rank that has joined.

        Args:
            gradients: the gradients from the live ranks.
            updated: the buckets that the live ranks gather.
            drop_gradients: whether to drop gradients of whole parameters after the step.
        """
        self.follow()
        self.shard.prepare(gradients)
        self.shard.optimizer.step()
        self.shard.finish(drop_gradients=drop_gradients)
        self.show_options()
        self.gather(updated)

    # --- Join --------------------------------------------------------------------------------------

    @property
    def join_config(self) -> JoinConfig:
        """The settings of the `Join` that the optimizer is in. Outside of one they say that it is not enabled."""
        return join_config_of(self._optimizer)

    @property
    def all_live(self) -> Callable[[], bool] | None:
        """Returns whether all ranks were live at the last announcement; None if the optimizer announces nothing."""
        return all_live_of(self._optimizer)

    def notify_join(self) -> None:
        """Tells joined ranks that an iteration begins. Does nothing if the optimizer is gone."""
        if (optimizer := self._owner()) is not None:
            Join.notify_join_context(optimizer)

    def raise_if_joined(self, live: int) -> None:
        """Raises as torch's heartbeat would, for an optimizer that counts live ranks without messages.

        Args:
            live: number of ranks that had inputs of their own in this iteration.

        Raises:
            RuntimeError: in a `Join` with ``throw_on_early_termination``, if a rank has run out of inputs.
        """
        raise_if_joined(self._optimizer, live, self.communication.ranks)
