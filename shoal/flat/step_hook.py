"""The hook right before an optimizer steps flat parameters, which makes torch.optim treat them as the originals.

torch calls global hooks before every optimizer's step. The first `ContiguousParams` registers one. It costs an
optimizer without flat parameters 1 µs, plus 30 ns per parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.flat._torch import compiler_is_near
from shoal.flat.elementwise import PER_ELEMENT, check_optimizer
from shoal.flat.flat_parameter import FlatParameter, GradientPresence
from shoal.flat.kernels import pick_kernel, unpick_kernel
from shoal.flat.modes import neutral_modes
from shoal.flat.optimizer_state import use_parts
from shoal.flat.stand_in import can_stand_in, fill, stand_in
from shoal.flat.together import Together

_parts_of = attrgetter("parts")

_CHECKED = "_shoal_checked_state"
"""The optimizer's attribute for the state that was checked. Loading a state dict makes a new state, which is checked
again.
"""


_uncompiled: dict[str, Callable[..., Any]] = {}  # functions that run uncompiled, even in a compiled step


@cache
def install() -> None:
    """Registers the hook, once per process."""
    # Here and not at the top, because torch.compiler.disable triggers a slow import. Making an optimizer triggers it as
    # well.
    _uncompiled["prepare"] = torch.compiler.disable(_prepare)  # type: ignore[no-untyped-call]
    torch.compiler.disable(_before_step, recursive=False)  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(_before_step)


def flat_parameters(optimizer: Optimizer) -> list[FlatParameter]:
    """The flat parameters of an optimizer."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is FlatParameter
    ]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(optimizer, Together):
        return None  # the step of each member comes here, too
    if is_dynamo_compiling():
        return _uncompiled["prepare"](optimizer, args, kwargs, compiled=True)
    for group in optimizer.param_groups:
        if FlatParameter in map(type, group["params"]):
            if compiler_is_near():
                return _uncompiled["prepare"](optimizer, args, kwargs, compiled=True)
            return _prepare(optimizer, args, kwargs, compiled=False)
    return None


def _prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> Any:
    check_optimizer(optimizer)
    flats = flat_parameters(optimizer)
    for flat in flats:
        flat.check_address()
    if vars(optimizer).get(_CHECKED) is not optimizer.state:
        _check_state(optimizer, flats)
    for group in optimizer.param_groups:
        pick_kernel(optimizer, group)
    double = stand_in(optimizer) if not compiled and can_stand_in(optimizer) else None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _settle(optimizer, flats, double, compiled)
        return None if double is None else ((double, *args[1:]), kwargs)

    def close() -> Any:
        loss = closure()
        _settle(optimizer, flat_parameters(optimizer), double, compiled)
        return loss

    stepped = optimizer if double is None else double
    if "closure" in kwargs:
        return (stepped, *args[1:]), kwargs | {"closure": close}
    return (stepped, close, *args[2:]), kwargs


def _settle(optimizer: Optimizer, flats: list[FlatParameter], double: Optimizer | None, compiled: bool) -> None:
    """Looks at the gradients, and splits runs in which some parameters have one and others do not.

    The optimizer then skips the parts without gradients: no weight decay, no momentum, and a step count of their own.
    LBFGS uses zeros for missing gradients, with ordinary parameters too, so its runs are not split.
    """
    seen = [flat.presence() for flat in flats]
    if not isinstance(optimizer, LBFGS) and (GradientPresence.SOME in seen or any(map(_parts_of, flats))):
        with neutral_modes():  # parts outlive the step
            for flat, presence in zip(flats, seen, strict=True):
                if presence is GradientPresence.SOME and not flat.parts:
                    flat.split_by_presence()
            use_parts(optimizer)
        flats = flat_parameters(optimizer)
        seen = [flat.presence() for flat in flats]
    if isinstance(optimizer, SGD):
        unpick_kernel(optimizer)
    if double is not None:
        fill(double, optimizer, seen)
    elif compiled:
        for flat in flats:
            flat.show_to_compiler()


def _check_state(optimizer: Optimizer, flats: list[FlatParameter]) -> None:
    """Checks the shapes of a state once, because it may have been loaded, and torch's `load_state_dict` takes any
    shape.

    torch's fused kernels do not check shapes either, and write beyond the end of a tensor that is too short. A state
    dict can easily belong to other runs than these, so this check raises the error.

    Raises:
        ValueError: if state has another shape than its run.
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
