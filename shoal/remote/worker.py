"""The code that runs on a worker: the optimizer of its parameters, and the functions that trainers call."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from shoal.functional import BoundOptimizer, FunctionalOptimizer, bind
from shoal.remote.fallback import BoundTorch
from shoal.remote.locks import ParameterLocks

Options = dict[str, Any]
"""Options of a parameter group by name: learning rate and so on, without the parameters."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker makes its optimizers.

    Attributes:
        optimizer_class: the class that the user passed.
        functional: its functional form in `functional_optim_map`; None to use the class itself.
        args, kwargs: the arguments of its constructor after the parameters.
    """

    optimizer_class: Any
    functional: type | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self, params: Sequence[Tensor], options: Options) -> tuple[BoundOptimizer, Options]:
        """The optimizer of one parameter group with options of its own, and the options that it would have without
        them.
        """
        if self.functional is None:
            fallback = BoundTorch(self.optimizer_class, params, options, self.args, self.kwargs)
            return fallback, fallback.defaults
        group = bind(self.functional, params, *self.args, **self.kwargs)
        defaults = _options(group)
        if options and issubclass(self.functional, FunctionalOptimizer):  # the state may depend on these options
            return bind(self.functional, params, **{**defaults, **options}), defaults
        if options:
            group.options = options
        return group, defaults


@dataclass(frozen=True, slots=True)
class Added:
    """A worker's answer after it has added parameters of a group.

    Attributes:
        remote: the worker's optimizer.
        defaults: the options that the constructor's arguments give.
        options: the options of this group.
    """

    remote: rpc.RRef[WorkerOptimizer]
    defaults: Options
    options: Options


class WorkerOptimizer:
    """The part of one `DistributedOptimizer` on one worker. It has a state of its own, for parameters that others may
    share.

    Args:
        recipe: how to make the optimizer of a group.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._groups: dict[int, BoundOptimizer] = {}
        self._applied: dict[int, Options] = {}
        self._locks = ParameterLocks(())

    def add_group(self, number: int, params: Sequence[Tensor], options: Options) -> tuple[Options, Options]:
        """Adds the parameters of group `number` that live here. A second call with the same number replaces them.

        Returns:
            The constructor's options and those of the group.

        Raises:
            TypeError, ValueError: if a parameter is not a tensor or was given before, or if the optimizer refuses it.
        """
        taken = {id(param) for other, group in self._groups.items() if other != number for param in group.params}
        for index, param in enumerate(params):
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"parameter {index} of this worker is a {type(param).__name__}: an RRef to a tensor is needed"
                )
            if id(param) in taken:
                raise ValueError(f"parameter {index} of this worker was given before: give each parameter once")
            taken.add(id(param))
        group, defaults = self._recipe.make(params, options)
        # New objects, so that a step under way goes on with the old ones.
        groups = {**self._groups, number: group}
        self._applied = {**self._applied, number: _options(group)}
        self._locks = ParameterLocks(param for each in groups.values() for param in each.params)
        self._groups = groups
        return defaults, self._applied[number]

    def step(self, context_id: int, options: Mapping[int, Options]) -> None:
        """Applies the gradients of a context, with these options for each group, by `BoundOptimizer.step`."""
        gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)
        if gradients:
            groups = self._groups
            self.apply({number: [gradients.get(p) for p in groups[number].params] for number in options}, options)

    def apply(self, gradients: Mapping[int, list[Tensor | None]], options: Mapping[int, Options]) -> None:
        """Makes one step of each group with given gradients, one or None per parameter, under the parameters' locks."""
        with self._locks:
            for number, chosen in options.items():
                if not _same(chosen, self._applied[number]):
                    self._groups[number].options = chosen
                    self._applied[number] = chosen
                self._groups[number].step(gradients[number])

    def state(self) -> dict[int, dict[Any, Any]]:
        """A copy of the state, by group, then by the parameter's place among this worker's. State of no parameter has
        the key that it has in the optimizer.
        """
        with self._locks:
            states = {number: group.state_dict()["state"] for number, group in self._groups.items()}
            return {
                number: {place: _copied(entry) for place, entry in state.items()} for number, state in states.items()
            }

    def load(self, states: Mapping[int, dict[Any, Any]], options: Mapping[int, Options]) -> None:
        """The inverse of :meth:`state`, with the options to use from now on. Parameters without an entry start
        afresh.
        """
        with self._locks:
            for number, chosen in options.items():
                self._groups[number].load_state_dict({"state": states[number], "options": chosen})
                self._applied[number] = chosen


def join(
    recipe: Recipe,
    remote: rpc.RRef[WorkerOptimizer] | None,
    number: int,
    params: Sequence[rpc.RRef[Tensor]],
    options: Options,
) -> Added:
    """Called by a trainer: `WorkerOptimizer.add_group`, on a new optimizer if there is none yet."""
    optimizer = WorkerOptimizer(recipe) if remote is None else remote.local_value()
    defaults, options = optimizer.add_group(number, [param.local_value() for param in params], options)
    return Added(rpc.RRef(optimizer) if remote is None else remote, defaults, options)


def step(remote: rpc.RRef[WorkerOptimizer], context_id: int, options: dict[int, Options]) -> None:
    """Called by a trainer: `WorkerOptimizer.step`."""
    remote.local_value().step(context_id, options)


def state(remote: rpc.RRef[WorkerOptimizer]) -> dict[int, dict[Any, Any]]:
    """Called by a trainer: `WorkerOptimizer.state`."""
    optimizer: WorkerOptimizer = remote.local_value()
    return optimizer.state()


def load(remote: rpc.RRef[WorkerOptimizer], states: dict[int, dict[Any, Any]], options: dict[int, Options]) -> None:
    """Called by a trainer: `WorkerOptimizer.load`."""
    remote.local_value().load(states, options)


def _options(group: BoundOptimizer) -> Options:
    """A group's options; empty for a functional class written as in PyTorch's recipe, whose options can't be found."""
    try:
        return group.options
    except TypeError:
        return {}


def _same(some: Options, others: Options) -> bool:
    """Whether no option differs. A tensor never counts as equal: it may have changed in place."""
    return some == others if not any(isinstance(value, Tensor) for value in some.values()) else False


def _copied(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _copied(value) for name, value in entry.items()}
    return entry.clone() if isinstance(entry, Tensor) else copy.deepcopy(entry)
