"""The parameter groups and the state that users see of an optimizer that steps copies or pieces of the parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.cluster.strands import Strands
from shoal.flat import Shown
from shoal.optim.host_copy import HostCopy


class ShownCopies(Shown):
    """The groups and the state of an optimizer, with the model's parameters in place of those that it steps.

    Args:
        optimizer: the optimizer.
        groups: for each of its groups, the model's parameters.
        stepped: for each of the model's parameters, the tensor in whose place it is shown; empty if the state is shown
            as it is.
        host: the copy on the host, if the optimizer may be stepping in another thread; else None.
        wait: waits until no other thread is stepping.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[list[Tensor]],
        stepped: Mapping[Tensor, Tensor],
        host: HostCopy | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        made = (ModelGroup(optimizer, params, host, index) for index, params in enumerate(groups))
        self._made = ModelGroups(made, self.set_groups)
        super().__init__(optimizer, self._made, stepped, wait)

    @property
    def groups(self) -> Any:
        return self._made

    def set_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for group, options in zip(self._made, self.checked(groups), strict=True):
            group.replace(options)


def shown_of(optimizer: torch.optim.Optimizer, host: HostCopy | None, wait: Callable[[], None] = lambda: None) -> Shown:
    """What users see of an optimizer that steps the model, or a copy of it on the host.

    Args:
        optimizer: the optimizer.
        host: the copy that it steps, if it steps one.
        wait: waits until no other thread is stepping.
    """
    if host is None:
        return Shown(optimizer)
    stepped = host.stepped()
    parameter_of = {own: parameter for parameter, own in stepped.items()}
    groups = [[parameter_of[own] for own in group["params"]] for group in optimizer.param_groups]
    return ShownCopies(optimizer, groups, stepped, host, wait)


def shown_of_pieces(optimizer: torch.optim.Optimizer, strands: Strands) -> ShownCopies:
    """What users see of an optimizer that steps pieces of parameters. A state has the shape of a piece. If this rank
    carries several pieces of each parameter, the pieces are the keys of the state."""
    groups, count = [], len(strands.mine)
    for group in optimizer.param_groups:
        groups.append([strands.of[id(piece)] for piece in group["params"][: len(group["params"]) // count]])
    stepped = {strands.of[id(piece)]: piece for piece in strands.pieces} if count == 1 else {}
    return ShownCopies(optimizer, groups, stepped)


class ModelGroups(list["ModelGroup"]):
    """The list of these groups. A group that users put in the place of one gives its options to it.

    Args:
        groups: the groups.
        replace: gives them the options of others.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> list[dict[str, Any]]:
        return copy.deepcopy(list(self), memo)  # type: ignore[arg-type]

    def __init__(self, groups: Iterable[ModelGroup], replace: Callable[[list[Any]], None]) -> None:
        super().__init__(groups)
        self._replace = replace

    def __setitem__(self, place: Any, given: Any) -> None:
        changed: list[Any] = list(self)
        changed[place] = given
        self._replace(changed)


class ModelGroup(MutableMapping[str, Any]):
    """A parameter group that users see, of an optimizer that steps copies. It has the model's parameters, and the
    options of the optimizer's group, which users may change.

    Args:
        optimizer: the optimizer.
        params: the model's parameters.
        host: the copy on the host, if the optimizer may be stepping in another thread; else None.
        index: the number of the group.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: list[Tensor], host: HostCopy | None, index: int
    ) -> None:
        self._optimizer, self._params, self._host, self._index = optimizer, params, host, index

    @property
    def _options(self) -> dict[str, Any]:
        aside = None if self._host is None else self._host.aside
        return (self._optimizer.param_groups if aside is None else aside)[self._index]

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._host is None else self._host.lock

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._options[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("the parameters of a run are fixed")
        with self._locked():
            self._options[key] = value

    def __delitem__(self, key: str) -> None:
        del self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        """A dictionary with the same entries."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def replace(self, given: Mapping[str, Any]) -> None:
        """Have the options of another group."""
        with self._locked():
            own = self._options
            options = {key: own["params"] if key == "params" else value for key, value in given.items()}
            own.clear()
            own.update(options)
