"""The options of parameter groups: copied from one optimizer to another, and as numbers for other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

_NOT_OPTIONS = ("params", "param_names")

Groups = Sequence[dict[str, Any]]


def copy_options(source: Groups, target: Groups) -> None:
    """Copies the options of each group of ``source`` to the group of ``target`` at the same place."""
    for giving, taking in zip(source, target, strict=True):
        taking.update({name: value for name, value in giving.items() if name not in _NOT_OPTIONS})


def numbers_of(groups: Groups | dict[str, Any]) -> Tensor:
    """Collects the numbers in parameter groups, or in a scheduler's state dict, as one float64 vector on the CPU.

    It includes numbers in tensors of one element, in sequences and in dictionaries. Groups with equal keys have their
    numbers at equal places. The vector has everything that a scheduler changes. Booleans are left out: they choose
    kernels.
    """
    return torch.tensor([float(value) for value in _leaves(groups)], dtype=torch.float64, device="cpu")


def take_numbers(groups: Groups, numbers: Tensor) -> None:
    """Sets the options to the numbers that :func:`numbers_of` returned on a rank with equal groups. Writes to tensors
    in place.
    """
    for group, taken in zip(groups, with_numbers(groups, numbers), strict=True):
        for name, value in taken.items():
            if isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def with_numbers(value: Any, numbers: Tensor) -> Any:
    """A copy of groups or of a state dict, with the numbers that :func:`numbers_of` returned on another rank.

    Tensors with numbers are new objects, because one tensor can be at several places of a scheduler's state.
    """
    return _replaced(value, iter(numbers.tolist()))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for name in _names(value):
            yield from _leaves(value[name])


def _replaced(value: Any, values: Iterator[float]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        number = next(values)
        return int(number) if isinstance(value, int) and number.is_integer() else number
    if isinstance(value, Tensor) and value.numel() == 1:
        return torch.full_like(value, next(values))
    if isinstance(value, list | tuple):
        items = [_replaced(item, values) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        taken = copy(value)  # keeps the class: the milestones of a scheduler are a Counter
        for name in _names(value):
            taken[name] = _replaced(value[name], values)
        return taken
    return value


def _names(value: dict[Any, Any]) -> list[Any]:
    return sorted((name for name in value if name not in _NOT_OPTIONS), key=str)
