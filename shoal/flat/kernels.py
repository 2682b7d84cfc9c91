"""The choice of torch's kernel for an optimizer's step, if the user has chosen none."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from shoal.flat.flat_parameter import FlatParameter, GradientPresence
from shoal.flat.together import members_of

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
_SWITCHES: Final = frozenset({"nesterov", "maximize", "amsgrad"})
_NUMBERS: Final = (int, float, str, type(None))


def pick_kernels(optimizer: Optimizer) -> None:
    """Selects torch's fused kernel for the next step of ``optimizer``, wherever torch has one and the user has chosen
    no kernel.

    On flat memory it is the fastest: one pass that keeps nothing. Call this before every step, when the gradients are
    there.
    """
    for member in members_of(optimizer):
        for group in member.param_groups:
            pick_kernel(member, group)
            if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in group["params"]):
                unpick(member, group)
        if isinstance(member, SGD):
            unpick_kernel(member)


def pick_kernel(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Turns on torch's fused kernel, the fastest on flat memory, if it exists and the user has chosen no kernel."""
    if not _has_options_for_fused(optimizer, group):
        unpick(optimizer, group)
        return
    if group.get("fused", False) is not None or group.get("foreach") is not None or group.get("differentiable"):
        return
    parameters = group["params"]
    if not all(map(_has_fused_kernels, parameters)):
        return
    group["fused"] = True
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")  # loaded in the form for another kernel
        if step is not None:
            optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32, device=parameter.device)


def unpick_kernel(optimizer: SGD) -> None:
    """Turns the fused kernel off for this step if only some runs have a momentum buffer: torch 2.13's fused SGD fails
    then.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"]:
            states = [optimizer.state.get(run, {}) for run in group["params"] if _has_gradient(run)]
            if len({state.get("momentum_buffer") is None for state in states}) == 2:
                unpick(optimizer, group)


def unpick(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Turns the fused kernel off for this step, unless the user has chosen it."""
    if optimizer.defaults.get("fused", True) is None and group.get("fused"):
        group["fused"] = None


def _has_options_for_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the fused kernels take these options: they take plain numbers only (no numpy.bool, no numpy.float32), a
    tensor only as the learning rate, and no numbers as switches.
    """
    for name, value in group.items():  # in each step, so types that are surely plain come first
        kind = type(value)
        if kind is int and name in _SWITCHES:
            return False
        if kind not in _PLAIN and name in optimizer.defaults and not _is_taken(name, value):
            return False
    return True


def _is_taken(name: str, value: Any) -> bool:
    if isinstance(value, tuple | list):
        return _PLAIN.issuperset(map(type, value)) or all(isinstance(part, _NUMBERS) for part in value)
    return isinstance(value, _NUMBERS) or (name == "lr" and isinstance(value, Tensor))


def _has_gradient(parameter: Tensor) -> bool:
    """Whether there is a gradient. Does not read a flat gradient, which would have to be gathered."""
    if type(parameter) is FlatParameter:
        return parameter.presence() is not GradientPresence.NONE
    return parameter.grad is not None


def _has_fused_kernels(parameter: Tensor) -> bool:
    if parameter.device.type == "cpu":  # with half precision, torch 2.13's SGD moves nothing (pytorch#191763)
        return parameter.dtype in (torch.float32, torch.float64)
    return parameter.device.type == "cuda" and parameter.is_floating_point()
