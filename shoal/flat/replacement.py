"""Notices when a module gives up a flat parameter for another `nn.Parameter`, which no look at the parameter can tell.

`module.weight = nn.Parameter(...)` does so; so does `module.to("meta")`, which tells no hook. So the places where
modules hold the parameters are remembered, and looked at.

`load_state_dict(assign=True)` does the same, but means only the values. So these are copied into flat memory, and the
module keeps its parameter: the optimizer goes on training it. For that a global hook, which torch calls when a module
registers a parameter, is put there when the first `ContiguousParams` is made; it costs other registrations about a
microsecond.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.flat.gradients import home_of


class Places:
    """Where modules hold some parameters: found by looking at all modules of the process, about 0.1 s at most."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._indices: list[int] = []
        self._owners: list[Mapping[str, Tensor | None]] = []
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        for module in gc.get_objects():
            if not issubclass(type(module), nn.Module):
                continue
            owner = module.__dict__.get("_parameters", {})  # none yet, if another thread is making it
            for name, parameter in list(owner.items()):
                if parameter is not None and (index := indices.get(id(parameter))) is not None:
                    self._indices.append(index)
                    self._owners.append(owner)
                    self._names.append(name)
                    self._parameters.append(parameter)

    def replaced(self) -> tuple[int, str] | None:
        """The number of a parameter in whose place a module has another one, and the name there.

        A place that is empty now is fine: the parameter was dropped or renamed, as in pruning.
        """
        held = map(dict.get, self._owners, self._names)  # type: ignore[arg-type]
        if all(map(is_, held, self._parameters)):
            return None
        places = zip(self._indices, self._owners, self._names, self._parameters, strict=True)
        for index, owner, name, parameter in places:
            if (now := owner.get(name)) is not None and now is not parameter:
                return index, name
        return None


@cache
def install() -> None:
    """Registers the hook, once in the process."""
    register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    old = module._parameters.get(name)
    if old is None or old is parameter or home_of(old) is None or not _is_load_state_dict():
        return None
    if (parameter.dtype, parameter.device) != (old.dtype, old.device):
        return None
    with torch.no_grad():
        old.copy_(parameter)
    return old


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
