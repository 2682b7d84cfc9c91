"""What an optimizer keeps in its state dict, taken apart: the statistics, which are tensors of parameters in flat
memory, and a tree of everything else (see `shoal.optim.tree`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.flat import members_of
from shoal.optim import tree
from shoal.optim.own_form import own_form, tensors_in, unsaved_options
from shoal.optim.plain import is_plain, plain, restored

GROUPS, VALUES, REST, FORM = "groups", "values", "rest", "form"


@dataclass(frozen=True, slots=True)
class Contents:
    """What an optimizer keeps of some of its parameters.

    Attributes:
        statistics: (parameter, name, tensor), sorted by name: tensors that flat memory can hold.
        others: everything else: the options of the groups, the other state of the parameters, by number, the state that
            belongs to no parameter, and what the class keeps outside of all that (see `own_form`), if it does.
    """

    statistics: Sequence[tuple[int, str, Tensor]]
    others: dict[str, Any]

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        *,
        with_form: bool = True,
    ) -> Contents:
        """The contents of an optimizer; the options are `groups`. Without `with_form`, what the class keeps outside of
        its state and its options is left out."""
        held = [
            (index, name, dense(value))
            for index, parameter in enumerate(parameters)
            for name, value in optimizer.state.get(parameter, {}).items()
        ]
        statistics = in_flat_memory(held)
        taken = {(index, name) for index, name, _ in statistics}
        values: dict[int, dict[Any, Any]] = {}
        for index, name, value in held:
            if (index, name) not in taken:
                values.setdefault(index, {})[name] = value
        rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        form = own_form(optimizer) if with_form else None
        unsaved = unsaved_options(optimizer)
        options = [{n: _without_class(value) for n, value in group.items() if n not in unsaved} for group in groups]
        return cls(statistics, Others(options, values, rest, form).as_tree)

    def with_places(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that have places in the tree beforehand: the parameters, and the statistics."""
        return [*parameters, *(tensor for _, _, tensor in self.statistics)]

    def encoded(self, tensors: list[Tensor], names: Sequence[str]) -> bytes:
        """The tree of the others. Its tensors are added to `tensors`, which have places already.

        Args:
            tensors: the parameters, the statistics.
            names: the names of the parameters; [] if they have none.

        Raises:
            CannotTravel: if something can't be encoded.
        """

        return tree.encode(self.others, tensors, partial(place_of, names))


def place_of(names: Sequence[str], path: tree.Path) -> str:
    """Names the place of something in the others, for a message.

    Args:
        names: the names of the parameters; [] if they have none.
        path: the way to it.
    """
    match path:
        case (part, int(index), *below) if below and part in (GROUPS, VALUES):
            of = repr(names[index]) if part == VALUES and index < len(names) else index
            owner = f"parameter group {of}" if part == GROUPS else f"state of parameter {of}"
            return f"{owner}: {tree.shown(tuple(below))}"
        case (_, *below) if below:
            return f"state of the optimizer: {tree.shown(tuple(below))}"
    return "the optimizer's state"


def dense(value: Any) -> Any:
    """A sparse tensor, such as the momentum that SGD makes of sparse gradients, as a dense one; the rest as it is. The
    optimizer steps with either."""
    return value.to_dense() if isinstance(value, Tensor) and value.layout is not torch.strided else value


def _without_class(option: Any) -> Any:
    """A text or a number of a class of its own as Python's, which a newcomer gives the class that its own has."""
    is_one = isinstance(option, str | bytes | int | float) and not isinstance(option, Enum | bool)
    return plain(option) if is_one else option


def in_flat_memory(held: Sequence[tuple[int, Any, Any]]) -> list[tuple[int, str, Tensor]]:
    """Those of (parameter, name, value) that flat memory can hold, sorted by name: tensors that share their memory with
    no other, of dtypes that flat memory has, and whose elements lie in order."""
    able = [
        one
        for one in held
        if type(one[1]) is str
        and type(one[2]) is Tensor
        and one[2].layout is torch.strided
        and tree.carrier(one[2].dtype) is one[2].dtype
        and _lies_in_order(one[2])
    ]
    memories = Counter(tree.memory_of(value) for _, _, value in able)
    return sorted((one for one in able if memories[tree.memory_of(one[2])] == 1), key=lambda one: (one[1], one[0]))


def _lies_in_order(tensor: Tensor) -> bool:
    """Whether the elements lie in order, or as those of a parameter in channels_last before it moved to flat memory; or
    whether one element stands for all. A matrix that lies otherwise, as some that torch.linalg makes, is computed with
    in another order, and so with other rounding, if it moves there."""
    if tensor.is_contiguous() or not any(tensor.stride()):
        return True
    as_channels = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return as_channels is not None and tensor.is_contiguous(memory_format=as_channels)


@dataclass(frozen=True, slots=True)
class Others:
    """The others of a state that is loaded.

    Attributes:
        groups: the options of each parameter group.
        values: by number of a parameter, everything else in its state.
        rest: the state of no parameter.
        form: what the class keeps outside of all that; None if nothing.
    """

    groups: list[dict[Any, Any]]
    values: dict[int, dict[Any, Any]]
    rest: dict[Any, Any]
    form: Any = None

    @property
    def as_tree(self) -> dict[str, Any]:
        """As `Contents.others`."""
        others = {GROUPS: self.groups, VALUES: self.values, REST: self.rest}
        return others if self.form is None else others | {FORM: self.form}

    @classmethod
    def decoded(
        cls,
        encoded: bytes,
        tensors: Sequence[Tensor],
        mine: Any,
        parameters: int,
        kinds: Sequence[type[Tensor]] = (),
    ) -> Others:
        """Decode what `Contents.encoded` has encoded.

        Args:
            encoded: the tree.
            tensors: the parameters, the statistics, the tensors of the tree.
            mine: this peer's own others.
            parameters: how many there are.
            kinds: the classes of tensors that this peer's optimizer has, see `tree.kinds_of_tensors`.

        Raises:
            ValueError: if it is anything else.
        """
        given = tree.decode(encoded, tensors, mine, kinds)
        if type(given) is not dict or given.keys() - {FORM} != {GROUPS, VALUES, REST}:
            raise ValueError("the state of the optimizer has not the parts of one")
        groups, values, rest = given[GROUPS], given[VALUES], given[REST]
        if type(groups) is not list or any(type(one) is not dict for one in (*groups, values, rest)):
            raise ValueError("the options or the state of the optimizer are no dictionaries")
        if any(type(name) is not str or name == "params" for group in groups for name in group):
            raise ValueError("an option of a parameter group has no name, or is 'params'")
        if any(type(n) is not int or not 0 <= n < parameters or type(of) is not dict for n, of in values.items()):
            raise ValueError(f"the state has values of a parameter that does not exist: there are {parameters}")
        return cls(groups, values, rest, given.get(FORM))

    @classmethod
    def of_older(cls, groups: list[dict[str, Any]], values: Sequence[tuple[int, str, Any]]) -> Others:
        """The others of a release that had plain values only."""
        by_number: dict[int, dict[Any, Any]] = {}
        for number, name, value in values:
            by_number.setdefault(number, {})[name] = value
        return cls(groups, by_number, {})


def device_of(tensor: Tensor, parameter: Tensor, options: Mapping[str, Any]) -> torch.device:
    """Where a tensor of a parameter's state belongs, by this peer's own options. As torch does: with its parameter, but
    counts of steps (0-d) on the host, unless the kernel reads them on the device."""
    reads_there = bool(tensor.dim() or options.get("capturable") or options.get("fused"))
    return parameter.device if reads_there else torch.device("cpu")


def place(others: Others, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Move tensors of others that were decoded, in place, to where this peer's optimizer needs them. An option that is
    a tensor here already stays where it is."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for number, values in others.values.items():
        parameter = parameters[number]
        for tensor in tensors_in(values):
            _move(tensor, device_of(tensor, parameter, groups.get(id(parameter), {})))
    for own, options in zip(optimizer.param_groups, others.groups, strict=False):
        for name, value in options.items():
            for tensor in tensors_in(value):
                mine, first = own.get(name), next(iter(own["params"]), tensor)
                _move(tensor, mine.device if isinstance(mine, Tensor) else device_of(tensor, first, own))
    for tensor in tensors_in(others.rest):
        _move(tensor, device_of(tensor, next(iter(parameters), tensor), {}))


def _move(tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


def options_for(
    optimizer: torch.optim.Optimizer, mine: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The options that a newcomer's groups get.

    Plain values get the type that they have here. A tensor stays one, except where an optimizer of torch has a number:
    there, tensors go with kernels that this machine may not have.

    Raises:
        ValueError: with the name of an option that this peer's groups can't have.
    """
    are_torchs = [
        type(member).__module__.startswith("torch.optim")
        for member in members_of(optimizer)
        for _ in member.param_groups
    ]

    def as_mine(value: Any, own: Any, name: str, are_torchs: bool) -> Any:
        takes_number = isinstance(own, Tensor) or (are_torchs and own is not None)
        if isinstance(value, Tensor):
            return restored(plain(value), own, name) if takes_number and value.numel() == 1 else value
        return restored(value, own, name) if is_plain(value) and not isinstance(value, tuple) else value

    return [
        {name: as_mine(value, own.get(name), name, is_torchs) for name, value in options.items()}
        for own, options, is_torchs in zip(mine, given, are_torchs, strict=True)
    ]
