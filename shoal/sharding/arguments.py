"""Checks of the arguments of `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from shoal.flat import members_of, needs_all_parameters, needs_sparse_gradients
from shoal.functional import refuse_functional_form

Partition = Literal["auto", "elements", "parameters"]
Partitions = Partition | Sequence[Partition]
"""One for all groups, or one for each."""


def checked(params: Any) -> list[Any]:
    """The tensors or parameter groups in ``params``.

    Raises:
        TypeError: if it is no iterable of tensors or of groups.
        ValueError: if it is empty, or a group has no parameters.
    """
    if isinstance(params, Tensor):
        raise TypeError("params is an iterable of tensors or parameter groups, got one tensor: put it in a list")
    if not isinstance(params, Iterable):
        raise TypeError(f"params is an iterable of tensors or parameter groups, got {type(params).__name__}")
    given = list(params)
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got no parameters")
    groups = [entry for entry in given if isinstance(entry, dict)]
    for group in groups:
        if "params" not in group:
            raise ValueError("a parameter group has a key 'params'")
    if groups and len(groups) < len(given):
        raise TypeError("params is an iterable of tensors or of parameter groups, not of both")
    return given


def checked_class(optimizer_class: Any) -> None:
    """Refuses optimizers that cannot be sharded.

    Raises:
        TypeError: if the class is LBFGS or derives from it, or is the functional form of an optimizer.
    """
    made = optimizer_class
    while isinstance(made, partial):
        made = made.func
    refuse_functional_form(made)
    if isinstance(made, type) and issubclass(made, LBFGS):
        raise TypeError(
            f"{made.__qualname__} makes one vector of all parameters, so each rank would step its share by a direction "
            f"and a step size of its own: use {made.__qualname__} itself, on all ranks, after DDP has reduced gradients"
        )


def checked_gradients(optimizer_class: Any, dense: Mapping[str, bool]) -> None:
    """Refuses an optimizer that needs sparse gradients where it would get dense ones.

    Args:
        optimizer_class: the class, or a function that makes the optimizer.
        dense: the arguments with which gradients are dense, and whether they were given.

    Raises:
        TypeError: with the first of these arguments that was given.
    """
    while isinstance(optimizer_class, partial):
        optimizer_class = optimizer_class.func
    given = [name for name, is_given in dense.items() if is_given]
    if given and isinstance(optimizer_class, type) and needs_sparse_gradients(optimizer_class):
        raise TypeError(
            f"{optimizer_class.__qualname__} steps only the rows of sparse gradients, which are dense with {given[0]}: "
            "leave that out, or choose an optimizer that takes both, such as SGD or Adagrad"
        )


_told: set[str] = set()
"""The classes of which a warning was given."""


def warn_of_division(optimizer: Optimizer, world_size: int) -> None:
    """Warns once about a class whose step computes something from all parameters, which are divided over ranks."""
    for kind in map(type, members_of(optimizer)):
        why = needs_all_parameters(kind) if world_size > 1 else ""
        if why and kind.__name__ not in _told:
            _told.add(kind.__name__)
            warnings.warn(
                f"{kind.__name__} needs all parameters: {why}, and here each rank would compute it from its share "
                f"alone. Use {kind.__name__} itself, on all ranks, after DDP has reduced gradients; or another class",
                stacklevel=2,
            )


def may_cut(partition: Partitions, groups: int, *, element_wise: bool, world_size: int) -> list[bool]:
    """For each of some groups, whether shares may begin and end inside a parameter.

    Raises:
        ValueError: if ``partition`` is none of the three names, and no list of them for all groups.
    """
    each = list(partition) if isinstance(partition, list | tuple) else [partition] * groups
    if len(each) != groups:
        raise ValueError(
            f"partition has {len(each)} entries, and there are {groups} parameter groups: give one for each"
        )
    if wrong := [name for name in each if name not in ("auto", "elements", "parameters")]:
        raise ValueError(f"partition is 'auto', 'elements' or 'parameters', got {wrong[0]!r}")
    return [name == "elements" or (name == "auto" and element_wise and world_size > 1) for name in each]
