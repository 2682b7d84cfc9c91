"""Notices when a module gives up a flat parameter for another `nn.Parameter`, which no look at the parameter can tell.

`module.weight = nn.Parameter(...)` registers a parameter, and torch calls a global hook then. It is put there when the
first `ContiguousParams` is made, and costs other registrations about a microsecond.

`load_state_dict(assign=True)` does the same, but means only the values. So these are copied into flat memory, and the
module keeps its parameter: the optimizer goes on training it.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.flat.gradients import home_of


@cache
def install() -> None:
    """Registers the hook, once in the process."""
    register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    old = module._parameters.get(name)
    if old is None or old is parameter:
        return None
    if (ours := home_of(parameter)) is not None:
        ours[0].replaced.pop(ours[1], None)  # it is put back
    if (ours := home_of(old)) is None:
        return None
    if _is_load_state_dict() and (parameter.dtype, parameter.device) == (old.dtype, old.device):
        with torch.no_grad():
            old.copy_(parameter)
        return old
    home, index = ours
    home.replaced[index] = name
    return None


def _is_load_state_dict() -> bool:
    """Whether the registration comes from `Module._load_from_state_dict`, through `__setattr__`."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "_load_from_state_dict":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
