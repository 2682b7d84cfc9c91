"""Gathers the state of an optimizer from the strands of a cluster's ranks to rank 0, and scatters it back. All ranks
call these functions at once. They call no hooks of users: `StrandReplica` does so at rank 0, with whole state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.cluster.strands import Strands
from shoal.cluster.whole import cut, full, shared_by_all
from shoal.flat import is_per_tensor, without_hooks

StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for a tensor that only rank 0 has. It has the shape of its parameter."""

    dtype: torch.dtype


def check_fits(state: StateDict, groups: Sequence[dict[str, Any]], model: Sequence[Tensor]) -> None:
    """At rank 0: check that a torch optimizer's state dict is of these parameters.

    Raises:
        ValueError: if it has other groups, or a tensor for a parameter of another shape.
    """
    given = state["param_groups"]
    if [len(group["params"]) for group in given] != [len(group["params"]) for group in groups]:
        raise ValueError("the state dict has other parameter groups than this optimizer")
    for number, held in state["state"].items():
        for name, value in held.items():
            if is_of_parameter(name, value, model[number]) and value.shape != model[number].shape:
                raise ValueError(
                    f"the state dict has a {name} of shape {tuple(value.shape)} for parameter {number}, which is of "
                    f"shape {tuple(model[number].shape)}"
                )


def is_of_parameter(name: str, value: object, parameter: Tensor) -> bool:
    """Whether a value in a whole state should have an element for each element of its parameter. Counters, and other
    0-dim tensors beside a parameter that is none, are numbers for all of it."""
    if not isinstance(value, Tensor) or is_per_tensor(name, value):
        return False
    return value.dim() > 0 or parameter.dim() == 0


# -- an optimizer that steps the pieces of strands


def gather_state(strands: Strands, optimizer: torch.optim.Optimizer, own: Sequence[Tensor]) -> StateDict:
    """Gather the state of an optimizer that steps pieces.

    Args:
        strands: the pieces of this rank.
        optimizer: the optimizer.
        own: the tensors that the optimizer steps, one for each piece.

    Returns:
        At rank 0, the state dict that an optimizer of the whole parameters would have; {} at other ranks.
    """
    kept = [optimizer.state.get(piece, {}) for piece in own]
    names = {name for held, piece in zip(kept, own, strict=True) for name in held if _belongs(name, held[name], piece)}
    wholes = {}
    for name in shared_by_all(strands.group, sorted(names)):
        pairs = [(held.get(name), piece) for held, piece in zip(kept, own, strict=True)]
        wholes[name] = strands.gather([v if _belongs(name, v, p) else torch.zeros_like(p) for v, p in pairs])
    if strands.rank:
        return {}
    state = {}
    for number, place in enumerate(strands.numbers[0]):
        held = kept[place]
        if held:
            state[number] = {
                name: wholes[name][number] if _belongs(name, value, own[place]) else copy.deepcopy(value)
                for name, value in held.items()
            }
    return {"state": state, "param_groups": list(_groups_of_model(strands, optimizer))}


def scatter_state(
    strands: Strands, optimizer: torch.optim.Optimizer, own: Sequence[Tensor], whole: StateDict | None
) -> None:
    """Load a state of the whole parameters into an optimizer that steps pieces. Only rank 0 has `whole`; it is None at
    other ranks. See `gather_state`."""
    told, tensors = _told(strands, whole)
    values = {}
    for name, held in sorted(tensors.items()):
        wholes = [_whole_or_nothing(strands, number, held) for number in range(len(strands.model))]
        values[name] = strands.scatter(wholes)
    local: dict[int, dict[str, Any]] = {}
    for places in strands.numbers:
        for number, place in enumerate(places):
            for name, value in told["state"].get(number, {}).items():
                local.setdefault(place, {})[name] = (
                    values[name][place] if isinstance(value, Elsewhere) else copy.deepcopy(value)
                )
    groups, first = [], 0
    for group, given in zip(optimizer.param_groups, told["param_groups"], strict=True):
        places_of_group = list(range(first, first + len(group["params"])))
        options = {name: value for name, value in given.items() if name not in ("params", "param_names")}
        groups.append({**options, "params": places_of_group})
        first += len(places_of_group)
    names = [group.get("param_names") for group in optimizer.param_groups]
    with without_hooks(optimizer):
        optimizer.load_state_dict({"state": local, "param_groups": groups})
    for group, kept in zip(optimizer.param_groups, names, strict=True):
        if kept is not None:
            group["param_names"] = kept


def _whole_or_nothing(strands: Strands, number: int, held: dict[int, Tensor | Elsewhere]) -> Tensor:
    """The tensor that `Strands.scatter` takes for a parameter: zeros if there is no value."""
    value, parameter = held.get(number), strands.model[number]
    if isinstance(value, Tensor):
        return value
    dtype = parameter.dtype if value is None else value.dtype
    return torch.zeros(parameter.shape, dtype=dtype, device="meta" if strands.rank else "cpu")


def _belongs(name: str, value: object, piece: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.shape and not is_per_tensor(name, value)


def _groups_of_model(strands: Strands, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    first = 0
    with without_hooks(optimizer):
        packed = optimizer.state_dict()["param_groups"]
    for group in packed:
        count = len(group["params"]) // len(strands.mine)
        names = [name.rpartition("[")[0] for name in group.get("param_names", ())[:count]]
        numbers = list(range(first, first + count))
        yield {**group, "params": numbers} | ({"param_names": names} if names else {})
        first += count


# -- an optimizer that steps the model's own parameters


def gather_state_of_model(strands: Strands, optimizer: torch.optim.Optimizer) -> StateDict:
    """Gather the state of an optimizer that steps the model's own parameters. Returns {} at other ranks than 0."""
    with without_hooks(optimizer):
        given = optimizer.state_dict()
    state = {
        number: {name: full(value) if isinstance(value, Tensor) else value for name, value in sorted(held.items())}
        for number, held in sorted(given["state"].items())
    }
    return {} if strands.rank else {"state": state, "param_groups": given["param_groups"]}


def scatter_state_of_model(strands: Strands, optimizer: torch.optim.Optimizer, whole: StateDict | None) -> None:
    """The reverse of `gather_state_of_model`."""
    told, tensors = _told(strands, whole)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, held in sorted(tensors.items()):
        for number, value in sorted(held.items()):
            told["state"][number][name] = cut(strands.group, value, value.dtype, parameters[number])
    with without_hooks(optimizer):
        optimizer.load_state_dict(copy.deepcopy(told))  # torch would go on with the user's own tensors


def _told(strands: Strands, whole: StateDict | None) -> tuple[StateDict, dict[str, dict[int, Tensor | Elsewhere]]]:
    """Share a state that only rank 0 has, except its tensors.

    Returns:
        The state with an `Elsewhere` in place of each tensor, at all ranks; and the tensors by name and parameter's
        number, which are `Elsewhere` at other ranks than 0.
    """
    skeleton: StateDict = {}
    if whole is not None:
        state = {
            number: {name: _told_of(name, value, strands.model[number]) for name, value in held.items()}
            for number, held in whole["state"].items()
        }
        skeleton = {"state": state, "param_groups": whole["param_groups"]}
    told = shared_by_all(strands.group, skeleton)
    tensors: dict[str, dict[int, Tensor | Elsewhere]] = {}
    for number, held in told["state"].items():
        for name, value in held.items():
            if isinstance(value, Elsewhere):
                tensors.setdefault(name, {})[number] = value if whole is None else whole["state"][number][name]
    return told, tensors


def _told_of(name: str, value: object, parameter: Tensor) -> object:
    if isinstance(value, Tensor):  # a counter gets the shape that torch gives new ones, which checkpoints of ranks have
        return Elsewhere(value.dtype) if is_of_parameter(name, value, parameter) else value.reshape(())
    return value
