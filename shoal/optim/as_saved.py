"""Loads a torch state dict into an optimizer, so that it holds what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.flat import after_loading, before_loading, without_hooks
from shoal.optim.contents import device_of
from shoal.optim.own_form import GROUPS, STATE, has_torchs_form, unsaved_options
from shoal.optim.tree import tensors_in

KEPT_BY_TORCH = frozenset({int, float, bool, type(None), complex})


def load_as_saved(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict, which the optimizer may keep. Hooks are called as torch does.

    torch's own `load_state_dict` casts tensors of the state to the dtype of their parameter, also whole numbers and
    float32 state of a bfloat16 parameter. It makes a text of a generator's name, and a deque forgets its bound. Its own
    classes expect that. In other classes, what was saved is put back. Options that the class leaves out of its state
    dicts stay, while torch would drop them with the groups.
    """
    unsaved = unsaved_options(optimizer)
    left_out = [{name: group[name] for name in unsaved & group.keys()} for group in optimizer.param_groups]
    state_dict = before_loading(optimizer, state_dict)
    with without_hooks(optimizer):
        optimizer.load_state_dict(state_dict)
    for group, own in zip(optimizer.param_groups, left_out, strict=False):
        group.update({name: value for name, value in own.items() if name not in group})
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim")
    if kind.load_state_dict is torch.optim.Optimizer.load_state_dict and not is_torchs and has_torchs_form(state_dict):
        _put_back(optimizer, state_dict)
    after_loading(optimizer)


def load_exactly(
    optimizer: torch.optim.Optimizer, kept: Mapping[int, dict[str, Any]], options: Sequence[Mapping[str, Any]]
) -> None:
    """Set everything that an optimizer keeps of its parameters, to the bit and without code of its class.

    Args:
        optimizer: the optimizer.
        kept: by the number of a parameter, what it will keep.
        options: for each parameter group, options that replace the present ones.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for number, values in kept.items():
        parameter, group = parameters[number]
        if values:
            optimizer.state[parameter] = {
                name: value.to(device_of(value, parameter, group)) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)


def _put_back(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, state_dict[GROUPS], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            own = optimizer.state.get(parameter, {})
            for name, value in state_dict[STATE].get(number, {}).items():
                if isinstance(value, Tensor):
                    device = own[name].device if isinstance(own.get(name), Tensor) else parameter.device
                    own[name] = value.to(device)
                elif type(value) not in KEPT_BY_TORCH:
                    for tensor in tensors_in(value):
                        tensor.data = tensor.data.to(device_of(tensor, parameter, group))
                    own[name] = value
