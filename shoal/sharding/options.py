"""The options of parameter groups: shared between two optimizers, and as numbers for other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_NOT_OPTIONS = ("params", "param_names")

Groups = Sequence[dict[str, Any]]


def copy_options(source: Groups, target: Groups) -> None:
    """Gives the groups of ``target`` the options of those of ``source``, one by one."""
    for giving, taking in zip(source, target, strict=True):
        taking.update({name: value for name, value in giving.items() if name not in _NOT_OPTIONS})


def numbers_of(groups: Groups) -> Tensor:
    """All options that are numbers, or tensors or sequences of them, as one float64 vector.

    Groups with equal keys have them in equal places. Everything that a scheduler changes is among them. Booleans are
    not: they choose kernels.
    """
    values = [float(value) for group in groups for name in sorted(group) for value in _leaves(name, group[name])]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def take_numbers(groups: Groups, numbers: Tensor) -> None:
    """Sets the options to what :func:`numbers_of` gave on a rank with equal groups."""
    values = iter(numbers.tolist())
    for group in groups:
        for name in sorted(group):
            if name not in _NOT_OPTIONS:
                group[name] = _replaced(group[name], values)


def _leaves(name: str, value: Any) -> Iterator[Any]:
    if name in _NOT_OPTIONS or isinstance(value, bool):
        return
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(name, item)


def _replaced(value: Any, values: Iterator[float]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        number = next(values)
        return int(number) if isinstance(value, int) and number.is_integer() else number
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.fill_(next(values))
    if isinstance(value, list | tuple):
        items = [_replaced(item, values) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
