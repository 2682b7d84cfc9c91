"""The forms in which users give parameters: a module, parameters, named parameters, or groups of them with options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Given:
    """Parameters as the user gave them, each once.

    Attributes:
        parameters: all parameters, group after group.
        names: one name per parameter, empty if none was given.
        groups: for each group, the numbers of its parameters.
        options: for each group, its options. None if no groups were given; then there is one group.
    """

    parameters: Sequence[Tensor]
    names: Sequence[str]
    groups: Sequence[range]
    options: Sequence[dict[str, Any]] | None

    @staticmethod
    def of(given: nn.Module | Iterable[Any]) -> Given:
        """Reads the parameters that a user gave.

        Raises:
            TypeError: if something that should be a parameter is not a tensor.
            ValueError: if there are no parameters, or if one is in two groups.
        """
        if isinstance(given, Tensor):
            raise TypeError("give an iterable of parameters: a single tensor would be taken apart into its rows")
        items = list(given.named_parameters() if isinstance(given, nn.Module) else given)
        if not items:
            raise ValueError("there are no parameters; was an iterator used up before?")
        options = None
        groups: list[Any] = [items]
        if isinstance(items[0], Mapping):
            options = [{name: value for name, value in group.items() if name != "params"} for group in items]
            for number, group in enumerate(items):
                if not isinstance(group, Mapping) or "params" not in group:
                    raise TypeError(f"group {number} is no dict with 'params', as those of torch optimizers are")
            groups = [[group["params"]] if isinstance(group["params"], Tensor) else group["params"] for group in items]
        parameters: list[Tensor] = []
        names: list[str] = []
        ranges = []
        group_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            start = len(parameters)
            for item in group:
                name, parameter = item if isinstance(item, tuple) else ("", item)
                if not isinstance(parameter, Tensor):
                    raise TypeError(f"parameter {len(parameters)} is a {type(parameter).__name__}, not a tensor")
                if (first := group_of.get(id(parameter))) is None:
                    group_of[id(parameter)] = number
                    parameters.append(parameter)
                    names.append(name)
                elif first != number:
                    raise ValueError(f"parameter {name or len(parameters)} of group {number} is in group {first} too")
            ranges.append(range(start, len(parameters)))
        return Given(parameters, names, ranges, options)

    def like_given(self, lists: Sequence[list[Any]]) -> list[Any]:
        """One list per group, in the form in which the parameters were given: a list, or groups with their options."""
        if self.options is None:
            return list(lists[0])
        return [{"params": items} | options for items, options in zip(lists, self.options, strict=True)]

    def label(self, index: int) -> str:
        """The name of a parameter in messages."""
        name = f"{self.names[index]!r}, " if self.names[index] else ""
        return f"parameter {index} ({name}shape {tuple(self.parameters[index].shape)})"


class Listed:
    """What users give to an optimizer: tensors, (name, tensor) pairs, or parameter groups of either, as lists that can
    be read more than once. Unlike `Given`, it may be empty, and has what was given twice twice.

    Args:
        params: as given.

    Attributes:
        groups: the parameter groups; one without options if none were given.
        has_groups: whether some were given.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        given = list(params)
        self.has_groups = bool(given) and isinstance(given[0], dict)
        groups = given if self.has_groups else [{"params": given}]
        self.groups = [{**g, "params": [p] if isinstance(p := g["params"], Tensor) else list(p)} for g in groups]

    @property
    def params(self) -> list[Any]:
        """What was given, in the same form."""
        return self._formed(self.groups)

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The parameters, each with its name, or "" if it has none.

        Raises:
            ValueError: if one is no tensor.
        """
        items = [item for group in self.groups for item in group["params"]]
        found = [item if isinstance(item, tuple) else ("", item) for item in items]
        for _, parameter in found:
            if not isinstance(parameter, Tensor):
                raise ValueError(f"params= has a {type(parameter).__name__}: give tensors, or parameter groups")
        return found

    def like_given(self, tensors: Iterable[Tensor]) -> list[Any]:
        """What was given with other tensors in place of the parameters, in the same order."""
        others, groups = iter(tensors), []
        for group in self.groups:
            items = [(i[0], next(others)) if isinstance(i, tuple) else next(others) for i in group["params"]]
            groups.append({**group, "params": items})
        return self._formed(groups)

    def _formed(self, groups: list[dict[str, Any]]) -> list[Any]:
        return groups if self.has_groups else groups[0]["params"]
