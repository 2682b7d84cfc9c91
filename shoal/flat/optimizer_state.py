"""The state of an optimizer of flat parameters: split together with runs, and converted to and from the per-parameter
form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from shoal.flat.elementwise import is_per_tensor
from shoal.flat.flat_parameter import FlatParameter, RunParameter
from shoal.flat.memory_views import own_storage
from shoal.flat.together import members_of

State = dict[str, Any]


def use_parts(optimizer: Optimizer) -> None:
    """Replaces split runs by their parts, in the optimizer's groups and in its state.

    State with the run's shape is sliced without a copy. State that is one number is copied, because the parts' step
    counts may differ from now on.

    Raises:
        ValueError: for state that is neither.
    """
    for member in members_of(optimizer):
        _move_to_parts(member.state)
    for group in optimizer.param_groups:  # in place, because LBFGS and wrappers of optimizers hold the lists
        group["params"][:] = _leaves(group["params"])


def original_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The result of `optimizer.state_dict()` if it had been given the parameters themselves, in memory of its own."""
    _refuse_lbfgs(optimizer)
    packed = optimizer.state_dict()
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options = {name: value for name, value in packed_group.items() if name not in ("params", "param_names")}
        to_host = False
        if options.get("fused") and optimizer.defaults.get("fused", True) is None:
            options["fused"] = None  # the step hook chose it, not the user
            to_host = not options.get("capturable")  # other kernels need the step counts on the CPU
        states: dict[int, State] = {}
        for holder, key in zip(group["params"], packed_group["params"], strict=True):
            if (values := packed["state"].get(key)) is not None:
                states |= _taken_apart(holder, values)
        originals = _originals(group["params"])
        for index, parameter in enumerate(originals, number):
            if (values := states.get(id(parameter))) is not None:
                state[index] = values
                if to_host and isinstance(step := values.get("step"), Tensor):
                    values["step"] = step.cpu()
        groups.append(options | {"params": list(range(number, number + len(originals)))})
        number += len(originals)
    state |= copy.deepcopy({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})
    return {"state": state, "param_groups": groups}


def load_original_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads the state dict of an optimizer of the parameters themselves. Splits runs where steps or names of state
    differ.

    Raises:
        ValueError: if the state dict has other groups, or state that can't be laid out flat. Nothing is loaded then.
    """
    _refuse_lbfgs(optimizer)
    use_parts(optimizer)
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    originals = [_originals(group["params"]) for group in groups]
    found, wanted = [len(group["params"]) for group in saved_groups], [len(parameters) for parameters in originals]
    if found != wanted:
        raise ValueError(f"the state dict has groups of {found} parameters, but the optimizer has groups of {wanted}")
    states: dict[int, State] = {}  # by the id of the parameter
    for parameters, saved_group in zip(originals, saved_groups, strict=True):
        for parameter, key in zip(parameters, saved_group["params"], strict=True):
            states[id(parameter)] = state_dict["state"].get(key, {})
    flats = [parameter for group in groups for parameter in group["params"] if type(parameter) is FlatParameter]
    kinds = [[_kind(member, states[id(member.parameter)]) for member in flat.members] for flat in flats]
    for flat, kinds_of_members in zip(flats, kinds, strict=True):
        flat.split_by(kinds_of_members)
    keys = {key for group in saved_groups for key in group["params"]}
    packed_state: dict[Any, Any] = copy.deepcopy({k: v for k, v in state_dict["state"].items() if k not in keys})
    packed_groups = []
    number = 0
    for group, saved_group in zip(groups, saved_groups, strict=True):
        group["params"][:] = _leaves(group["params"])
        for index, holder in enumerate(group["params"], number):
            if values := _joined(holder, states):
                packed_state[index] = values
        stop = number + len(group["params"])
        options = {name: value for name, value in saved_group.items() if name != "param_names"}
        packed_groups.append(options | {"params": list(range(number, stop))})
        number = stop
    optimizer.load_state_dict({"state": packed_state, "param_groups": packed_groups})


def _leaves(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [
        leaf
        for parameter in parameters
        for leaf in (parameter.leaves() if type(parameter) is FlatParameter else [parameter])
    ]


def _originals(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters behind those of a group, in the order in which they were given to their `ContiguousParams`."""
    first_of_home: dict[int, int] = {}
    ordered: list[tuple[tuple[int, int], Tensor]] = []
    for place, parameter in enumerate(parameters):
        if type(parameter) is FlatParameter:
            first = first_of_home.setdefault(id(parameter.home), place)
            ordered += [((first, member.index), member.parameter) for member in parameter.members]
        else:
            ordered.append(((place, 0), parameter))
    return [parameter for _, parameter in sorted(ordered, key=lambda pair: pair[0])]


def _move_to_parts(state: MutableMapping[Tensor, State]) -> None:
    for flat in [key for key in state if isinstance(key, FlatParameter) and key.parts]:
        parts: dict[Tensor, State] = {
            leaf: {name: _slice(name, value, flat, leaf) for name, value in state[flat].items()}
            for leaf in flat.leaves()
        }
        del state[flat]
        state.update(parts)


def _slice(name: str, value: object, flat: FlatParameter, leaf: FlatParameter) -> object:
    if isinstance(value, Tensor) and value.shape == flat.shape:
        start = leaf.start - flat.start
        return own_storage(value[start : start + leaf.numel()])
    return _number(name, value)


def _number(name: str, value: object) -> object:
    """A copy of state that is one number, a string or None; Python's number for one of numpy.

    Raises:
        ValueError: for other state.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.clone()
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        return value.item()  # a number of numpy
    if value is None or isinstance(value, int | float | str):
        return value
    raise ValueError(
        f"the optimizer's state {name!r} is neither one number nor one number per element, so it cannot be split "
        "between parameters. (Runs are split when some of their parameters have no gradient.) Give ContiguousParams "
        "only parameters that always have one, or the optimizer original()"
    )


def _taken_apart(holder: Tensor, values: State) -> dict[int, State]:
    """The state of each parameter of a run, by the id of the parameter."""
    if type(holder) is not FlatParameter:
        return {id(holder): copy.deepcopy(values)}
    return {
        id(member.parameter): {name: _taken(name, value, holder, member) for name, value in values.items()}
        for member in holder.members
    }


def _taken(name: str, value: object, flat: FlatParameter, member: RunParameter) -> object:
    if isinstance(value, Tensor) and value.shape == flat.shape:
        start = member.span.start - flat.start
        return _shaped(value[start : start + len(member.span)], member).clone()
    return _number(name, value)


def _shaped(elements: Tensor, member: RunParameter) -> Tensor:
    """A parameter's elements of flat state, in the parameter's shape and strides."""
    return elements.as_strided(member.parameter.shape, member.parameter.stride())


def _is_per_element(name: str, value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and not is_per_tensor(name, value)


def _kind(member: RunParameter, state: State) -> object:
    """The properties that all parameters of one run must share: the names of their state, and its numbers."""
    return sorted(
        (name, None if _is_per_element(name, value, member.parameter) else repr(_plain(_number(name, value))))
        for name, value in state.items()
    )


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value


def _joined(holder: Tensor, states: Mapping[int, State]) -> State:
    """The state of a run, joined from that of its parameters."""
    if type(holder) is not FlatParameter:
        return states[id(holder)]
    first = holder.members[0].parameter
    joined: State = {}
    for name, value in states[id(first)].items():
        if not _is_per_element(name, value, first):
            joined[name] = _number(name, value)
            continue
        joined[name] = torch.zeros(holder.numel(), dtype=value.dtype, device=holder.device)
        for member in holder.members:
            start = member.span.start - holder.start
            elements = joined[name][start : start + len(member.span)]
            # torch's state may be sparse
            _shaped(elements, member).copy_(states[id(member.parameter)][name].to_dense())
    return joined


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "the state of LBFGS is one vector of all parameters, so it is not translated: save and load its own "
            "state_dict(), with the same ContiguousParams"
        )
