"""The hooks for `state_dict` and `load_state_dict` that users, and a few classes, register on an optimizer.

torch's own methods call them. An optimizer that makes or loads its state dict itself calls them by these functions, at
the same moments, and keeps them from the calls that it makes for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shoal.flat._torch import LOAD_HOOKS, SAVE_HOOKS, hooks_of, set_hooks
from shoal.flat.modes import users_modes

StateDict = dict[str, Any]


@users_modes()
def before_saving(optimizer: Optimizer) -> None:
    """Calls the hooks that come before ``optimizer.state_dict()``."""
    for hook in hooks_of(optimizer, SAVE_HOOKS[0]):
        hook(optimizer)


@users_modes()
def after_saving(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Calls the hooks that come after ``optimizer.state_dict()``. Returns the state dict as they leave it."""
    for hook in hooks_of(optimizer, SAVE_HOOKS[1]):
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def own_saving_hooks(optimizer: Optimizer) -> list[Callable[[Optimizer, StateDict], StateDict | None]]:
    """The hooks after ``state_dict()`` that are the class's own: functions of its package. They are a part of how the
    class saves itself."""
    package = type(optimizer).__module__.partition(".")[0]
    hooks = hooks_of(optimizer, SAVE_HOOKS[1])
    return [hook for hook in hooks if (getattr(hook, "__module__", "") or "").partition(".")[0] == package]


@users_modes()
def before_loading(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Calls the hooks that come before ``optimizer.load_state_dict(state_dict)``. Returns the state dict to load."""
    state_dict = state_dict.copy()
    for hook in hooks_of(optimizer, LOAD_HOOKS[0]):
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


@users_modes()
def after_loading(optimizer: Optimizer) -> None:
    """Calls the hooks that come after ``optimizer.load_state_dict(…)``."""
    for hook in hooks_of(optimizer, LOAD_HOOKS[1]):
        hook(optimizer)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """A context in which `state_dict` and `load_state_dict` of an optimizer call no hooks, because the calls are not
    the user's. One thread may use the optimizer meanwhile.
    """
    kept = {name: set_hooks(optimizer, name, {}) for name in (*SAVE_HOOKS, *LOAD_HOOKS)}
    try:
        yield
    finally:
        for name, hooks in kept.items():
            set_hooks(optimizer, name, hooks)
