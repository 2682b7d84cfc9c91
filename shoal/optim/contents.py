"""What an optimizer keeps in its state dict, taken apart: the statistics, which are tensors of parameters in flat
memory, and a tree of everything else (see `shoal.optim.tree`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.flat import members_of
from shoal.optim import tree
from shoal.optim.group_options import KERNELS
from shoal.optim.own_form import own_form, unsaved_options
from shoal.optim.plain import is_plain, plain, restored

NOT_SENT = KERNELS | {"params", "param_names"}
"""What newcomers have of their own in each group."""
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
        options = [{name: value for name, value in group.items() if name not in unsaved} for group in groups]
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
    shared = _share_memory([tensor for _, _, tensor in able])
    return sorted((one for one in able if id(one[2]) not in shared), key=lambda one: (one[1], one[0]))


def _share_memory(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of the tensors that are met twice, or that share memory with another of them."""
    counts = Counter(map(id, tensors))
    shared = {id(tensor) for tensor in tensors if counts[id(tensor)] > 1}
    spans = sorted((*_span_of(tensor), id(tensor)) for tensor in tensors if tensor.numel())
    reached, last = 0, 0  # the end of the spans before, and the tensor that reaches so far
    for begin, end, which in spans:
        if begin < reached:
            shared |= {which, last}
        if end > reached:
            reached, last = end, which
    return shared


def _span_of(tensor: Tensor) -> tuple[int, int]:
    begin, shape = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((count - 1) * step for count, step in shape)) * tensor.element_size()


def _lies_in_order(tensor: Tensor) -> bool:
    """Whether the elements lie in order, or as those of a parameter in channels_last before it moved to flat memory; or
    whether one element stands for all. A matrix that lies otherwise, as some that torch.linalg makes, is computed with
    in another order, and so with other rounding, if it moves there."""
    if tree.order_of(tensor) == () or not any(tensor.stride()):
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
        options = [{name: _without_class(value) for name, value in group.items()} for group in self.groups]
        others = {GROUPS: options, VALUES: self.values, REST: self.rest}
        return others if self.form is None else others | {FORM: self.form}

    @classmethod
    def decoded(
        cls,
        encoded: bytes,
        tensors: Sequence[Tensor],
        mine: Any,
        parameters: int,
        kinds: Sequence[type] = (),
        own: int = 0,
    ) -> Others:
        """Decode what `Contents.encoded` has encoded.

        Args:
            encoded: the tree.
            tensors: the parameters, the statistics, the tensors of the tree.
            mine: this peer's own others.
            parameters: how many there are.
            kinds: classes that this peer's optimizer has, see `tree.kinds_of`.

            own: the number of the parameters and the statistics.

        Raises:
            ValueError: if it is anything else.
        """
        given = tree.decode(encoded, tensors, mine, kinds, own)
        if type(given) is not dict or given.keys() - {FORM} != {GROUPS, VALUES, REST}:
            raise ValueError("the state of the optimizer has not the parts of one")
        groups, values, rest = given[GROUPS], given[VALUES], given[REST]
        if type(groups) is not list or any(type(one) is not dict for one in (*groups, values, rest)):
            raise ValueError("the options or the state of the optimizer are no dictionaries")
        if any(type(name) is not str for group in groups for name in group):
            raise ValueError("an option of a parameter group has no name")
        if any(isinstance(key, Tensor) for key in rest):
            raise ValueError("the state of no parameter is that of one")
        if any(type(n) is not int or not 0 <= n < parameters or type(of) is not dict for n, of in values.items()):
            raise ValueError(f"the state has values of a parameter that does not exist: there are {parameters}")
        return cls(_sent(groups), values, rest, given.get(FORM))

    @classmethod
    def of_older(cls, groups: list[dict[str, Any]], values: Sequence[tuple[int, str, Any]]) -> Others:
        """The others of a release that had plain values only."""
        by_number: dict[int, dict[Any, Any]] = {}
        for number, name, value in values:
            by_number.setdefault(number, {})[name] = value
        return cls(_sent(groups), by_number, {})


def _sent(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options without those that each peer has for itself, whoever has sent them."""
    return [{name: value for name, value in group.items() if name not in NOT_SENT} for group in groups]


def device_of(tensor: Tensor, parameter: Tensor, options: Mapping[str, Any]) -> torch.device:
    """Where a tensor of a parameter's state belongs, by this peer's own options. As torch does: with its parameter, but
    counts of steps (0-d) on the host, unless the kernel reads them on the device."""
    reads_there = bool(tensor.dim() or options.get("capturable") or options.get("fused"))
    return parameter.device if reads_there else torch.device("cpu")


def place(
    others: Others, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], own: Collection[Tensor]
) -> None:
    """Move tensors of others that were decoded, in place, to where this peer's optimizer needs them. An option that is
    a tensor here already stays where it is, and so do this peer's `own` tensors."""
    mine_already = set(map(id, own))

    def move(tensor: Tensor, device: torch.device) -> None:
        if tensor.device != device and id(tensor) not in mine_already:
            tensor.data = tensor.data.to(device)

    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for number, values in others.values.items():
        parameter = parameters[number]
        for tensor in tree.tensors_in(values):
            move(tensor, device_of(tensor, parameter, groups.get(id(parameter), {})))
    for group, options in zip(optimizer.param_groups, others.groups, strict=False):
        for name, value in options.items():
            for tensor in tree.tensors_in(value):
                mine, first = group.get(name), next(iter(group["params"]), tensor)
                move(tensor, mine.device if isinstance(mine, Tensor) else device_of(tensor, first, group))
    for tensor in tree.tensors_in(others.rest):
        move(tensor, device_of(tensor, next(iter(parameters), tensor), {}))


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
        is_number = isinstance(own, int | float | str)
        if isinstance(value, torch.nn.Parameter) or (is_number and not is_plain(value)):
            raise ValueError(f"{name} is a {type(value).__name__}, and {own!r:.40} at this peer")
        if isinstance(value, Tensor):
            return restored(plain(value), own, name) if takes_number and value.numel() == 1 else value
        if own is None or not is_plain(value) or next(tree.tensors_in(value), None) is not None:
            return value
        return restored(plain(value), own, name)

    return [
        {name: as_mine(value, own.get(name), name, is_torchs) for name, value in options.items()}
        for own, options, is_torchs in zip(mine, given, are_torchs, strict=True)
    ]
