"""What an optimizer keeps in its state dict, taken apart: the statistics, which are tensors of parameters in flat
memory, and a tree of everything else (see `shoal.optim.tree`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.optim import tree
from shoal.optim.plain import is_plain, plain, restored

GROUPS, VALUES, REST = "groups", "values", "rest"


@dataclass(frozen=True, slots=True)
class Contents:
    """What an optimizer keeps of some of its parameters.

    Attributes:
        statistics: (parameter, name, tensor), sorted by name: tensors that flat memory can hold.
        others: everything else: the options of the groups, the other state of the parameters, by number, and the state
            that belongs to no parameter.
    """

    statistics: Sequence[tuple[int, str, Tensor]]
    others: dict[str, Any]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> Contents:
        """The contents of an optimizer; the options are `groups`."""
        held = [
            (index, name, value)
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
        return cls(statistics, {GROUPS: [dict(group) for group in groups], VALUES: values, REST: rest})

    def encoded(self, tensors: list[Tensor], names: Sequence[str]) -> bytes:
        """The tree of the others. Its tensors are added to `tensors`, which have places already.

        Args:
            tensors: the parameters, the statistics.
            names: the names of the parameters; [] if they have none.

        Raises:
            CannotTravel: if something can't be encoded.
        """

        def show(path: tree.Path) -> str:
            match path:
                case (part, int(index), name, *below) if part in (GROUPS, VALUES):
                    of = repr(names[index]) if part == VALUES and index < len(names) else index
                    owner = f"parameter group {of}" if part == GROUPS else f"state of parameter {of}"
                    return f"{owner}: {name!r}" + "".join(f"[{key!r:.40}]" for key in below)
                case (_, key, *below):
                    return f"state of the optimizer: {key!r:.40}" + "".join(f"[{one!r:.40}]" for one in below)
            return "the optimizer's state"

        return tree.encode(self.others, tensors, show)


def in_flat_memory(held: Sequence[tuple[int, Any, Any]]) -> list[tuple[int, str, Tensor]]:
    """Those of (parameter, name, value) that flat memory can hold, sorted by name: tensors that share their memory with
    no other, of dtypes that flat memory has, and whose elements lie in order."""
    able = [
        one
        for one in held
        if type(one[1]) is str
        and type(one[2]) is Tensor
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
    """

    groups: list[dict[Any, Any]]
    values: dict[int, dict[Any, Any]]
    rest: dict[Any, Any]

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
        if type(given) is not dict or given.keys() != {GROUPS, VALUES, REST}:
            raise ValueError("the state of the optimizer has not the parts of one")
        groups, values, rest = given[GROUPS], given[VALUES], given[REST]
        if type(groups) is not list or any(type(one) is not dict for one in (*groups, values, rest)):
            raise ValueError("the options or the state of the optimizer are no dictionaries")
        if any(type(name) is not str or name == "params" for group in groups for name in group):
            raise ValueError("an option of a parameter group has no name, or is 'params'")
        if any(type(n) is not int or not 0 <= n < parameters or type(of) is not dict for n, of in values.items()):
            raise ValueError(f"the state has values of a parameter that does not exist: there are {parameters}")
        return cls(groups, values, rest)

    @classmethod
    def of_older(cls, groups: list[dict[str, Any]], values: Sequence[tuple[int, str, Any]]) -> Others:
        """The others of a release that had plain values only."""
        by_number: dict[int, dict[Any, Any]] = {}
        for number, name, value in values:
            by_number.setdefault(number, {})[name] = value
        return cls(groups, by_number, {})


def options_for(
    optimizer: torch.optim.Optimizer, mine: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The options that a newcomer's groups get.

    Plain values get the type that they have here. A tensor stays one, except where an optimizer of torch has a number:
    there, tensors go with kernels that this machine may not have.

    Raises:
        ValueError: with the name of an option that this peer's groups can't have.
    """
    are_torchs = type(optimizer).__module__.startswith("torch.optim")

    def as_mine(value: Any, own: Any, name: str) -> Any:
        takes_number = isinstance(own, Tensor) or (are_torchs and own is not None)
        if isinstance(value, Tensor):
            return restored(plain(value), own, name) if takes_number and value.numel() == 1 else value
        return restored(value, own, name) if is_plain(value) and not isinstance(value, tuple) else value

    return [
        {name: as_mine(value, own.get(name), name) for name, value in options.items()}
        for own, options in zip(mine, given, strict=True)
    ]
