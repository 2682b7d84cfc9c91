"""What happens right before an optimizer steps flat parameters, so that torch.optim treats them as the originals.

torch calls global hooks before and after every optimizer's step. Two are put there when the first `ContiguousParams` is
made; they cost an optimizer without flat parameters 1 µs, and 30 ns per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shoal.flat.elementwise import PER_ELEMENT, check_class
from shoal.flat.flat_parameter import FlatParameter, Presence
from shoal.flat.kernels import pick_kernel, unpick_kernel
from shoal.flat.optimizer_state import use_parts

_uncompiled: dict[str, Callable[..., Any]] = {}  # what runs without torch.compile, also if a step is compiled

_CHECKED = "_shoal_checked_state"
"""The attribute of an optimizer that holds its state, if it was looked at: loading a state dict makes it a new one."""


@cache
def install() -> None:
    """Registers the hooks, once in the process."""
    # Here, since the import behind it is slow; optimizers cause it as well. What it makes costs 10 µs per call
    # after a backward pass, so a usual step uses none.
    for name, function in (("before", _before_step), ("prepare", _prepare), ("after", _after_step)):
        _uncompiled[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    for inner in (_before_step, FlatParameter.settle_as_usual, _after_step):
        torch.compiler.disable(inner, recursive=False)  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def flat_parameters(optimizer: Optimizer) -> list[FlatParameter]:
    """The flat parameters of an optimizer."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is FlatParameter
    ]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # After a backward pass has emptied the caches, each Python function that is called costs 5 to 10 µs. So here is one
    # for all that a usual step needs: whole runs, with all their gradients, and a kernel that was picked before.
    if is_dynamo_compiling():
        return _uncompiled["before"](optimizer, args, kwargs)
    usual = len(args) == 1 and not kwargs
    for group in optimizer.param_groups:
        parameters = group["params"]
        if FlatParameter in map(type, parameters):
            check_class(type(optimizer))  # type: ignore[arg-type]
            ready = group.get("fused", False) is not None and vars(optimizer).get(_CHECKED) is optimizer.state
            if not (usual and ready and len(parameters) == 1 and parameters[0].settle_as_usual()):
                return _uncompiled["prepare"](optimizer, args, kwargs)
    return None


def _prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What any other step of flat parameters needs."""
    flats = flat_parameters(optimizer)
    for flat in flats:
        flat.check_address()
    _check_state(optimizer, flats)
    for group in optimizer.param_groups:
        pick_kernel(optimizer, group)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _settle(optimizer, flats)
        return None
    settling = _settling(optimizer, closure)
    if "closure" in kwargs:
        return args, kwargs | {"closure": settling}
    return (args[0], settling, *args[2:]), kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_dynamo_compiling():
        _uncompiled["after"](optimizer, args, kwargs)
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        if FlatParameter in map(type, parameters):
            for parameter in parameters:
                if type(parameter) is FlatParameter:
                    parameter.settled = None


def _settling(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, and then the look at the gradients that it made."""

    def close() -> Any:
        for flat in flat_parameters(optimizer):
            flat.settled = None
        loss = closure()
        _settle(optimizer, flat_parameters(optimizer))
        return loss

    return close


def _settle(optimizer: Optimizer, flats: list[FlatParameter]) -> None:
    """Looks at the gradients, and splits runs in which some parameters have one and others do not.

    The optimizer then skips the parts without: no weight decay, no momentum, a step count of their own. LBFGS takes
    zeros for gradients that are not there, from ordinary parameters too, so its runs stay whole.
    """
    mixed = [flat for flat in flats if flat.settle() is Presence.SOME or flat.parts]
    if mixed and not isinstance(optimizer, LBFGS):
        for flat in mixed:
            if not flat.parts:
                flat.split_by_presence()
        use_parts(optimizer)
        for flat in flat_parameters(optimizer):
            flat.settle()
    if isinstance(optimizer, SGD):
        unpick_kernel(optimizer)


def _check_state(optimizer: Optimizer, flats: list[FlatParameter]) -> None:
    """Looks once at a state that may have been loaded: torch's `load_state_dict` takes any shape.

    Its fused kernels look at none either, and write beyond the end of what is too short. Other runs than those that the
    state was saved with are easily had, so it is said here.

    Raises:
        ValueError: for state of another shape than its run's.
    """
    for flat in flats:
        for name, value in optimizer.state.get(flat, {}).items():
            if name in PER_ELEMENT and isinstance(value, Tensor) and value.shape != flat.shape:
                raise ValueError(
                    f"the optimizer's state {name!r} has shape {tuple(value.shape)}, but its run of parameters "
                    f"{tuple(flat.shape)}: the state dict is of other parameters, or of other runs. Save with "
                    "original_state_dict() of the ContiguousParams, and load with load_original_state_dict(), which "
                    "loads what was saved without Shoal too"
                )
    setattr(optimizer, _CHECKED, optimizer.state)
