"""What an optimizer's state dict holds beside torch's two parts ("state" and "param_groups"): entries of its own, or a
form that is all its own.

[Note: why it is compared, not loaded] Classes with a state dict of their own have a `load_state_dict` or a hook of
their own. Some of these unpickle bytes, or set attributes by name, so nothing that peers have sent may reach them.
Torch's two parts travel as a typed tree, and are put into the optimizer by Shoal itself. The rest is compared with this
peer's own. If the two differ, the state is refused by name, unless somebody has said how it travels (`shoal.travels`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from shoal.flat import own_saving_hooks, without_hooks
from shoal.optim import tree

log = logging.getLogger(__name__)

STATE, GROUPS = "state", "param_groups"


def has_torchs_form(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has the form that torch gives to those of its optimizers."""
    return isinstance(state_dict.get(STATE), dict) and isinstance(state_dict.get(GROUPS), list)


def own_form(optimizer: torch.optim.Optimizer) -> Any:
    """What the optimizer's state dict holds beside what `Optimizer.state` and `param_groups` hold; None if nothing. For
    a class that was given to `shoal.travels`, what its function returns.

    Hooks that users have registered are not called: what they add is for files.
    """
    if (pair := tree.pair_of(type(optimizer))) is not None:
        return pair.of(optimizer)
    if (state_dict := _own_state_dict(optimizer)) is None:
        return None
    held = {tree.memory_of(tensor) for tensor in tree.tensors_in([*optimizer.state.items(), *optimizer.param_groups])}
    return _beside(state_dict, optimizer.state, held) or None


def unsaved_options(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The options that the class leaves out of its state dicts, because they are no state: newcomers have their own."""
    state_dict = _own_state_dict(optimizer)
    if state_dict is None or not has_torchs_form(state_dict):
        return frozenset()
    saved = {name for group in state_dict[GROUPS] for name in group}
    return frozenset(name for group in optimizer.param_groups for name in group if name not in saved)


def _own_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The state dict, without what hooks of users add; None if the class saves itself as torch does."""
    hooks = own_saving_hooks(optimizer)
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not hooks:
        return None
    with without_hooks(optimizer):
        state_dict: dict[str, Any] = optimizer.state_dict()
    for hook in hooks:
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def check_form(optimizer: torch.optim.Optimizer, mine: Any, theirs: Any) -> None:
    """Check that this peer's optimizer can have what another peer's holds beside torch's two parts.

    Raises:
        ValueError: if that is not equal to this peer's, and the class was not given to `shoal.travels`.
    """
    if tree.pair_of(type(optimizer)) is not None:
        return
    if (path := tree.difference(mine, theirs)) is not None:
        kind = type(optimizer)
        where = tree.shown(path) if path else "what it holds beside torch's form"
        raise ValueError(
            f"the state dict of {kind.__module__}.{kind.__qualname__} has a form of its own, and {where} differs from "
            "this peer's: it is not loaded, since classes unpickle such entries. shoal.travels() can say how it travels"
        )


def give_form(optimizer: torch.optim.Optimizer, theirs: Any) -> None:
    """Let the function that was given to `shoal.travels` put another peer's value into this peer's optimizer. If it
    fails, a warning says so."""
    pair = tree.pair_of(type(optimizer))
    if pair is None or theirs is None:
        return
    try:
        pair.back(optimizer, theirs)
    except Exception as error:  # noqa: BLE001 (the user's code, and a value that anybody may have sent)
        log.warning(
            "%s could not take %r of the state that was loaded: %r", type(optimizer).__qualname__, pair.name, error
        )


def _beside(value: Any, state: Any, held: set[Any]) -> Any:
    """A value of a state dict without the parts that travel in torch's form."""
    if value is state:
        return None
    if not isinstance(value, Mapping):
        return value
    if has_torchs_form(value) and all(tree.memory_of(tensor) in held for tensor in tree.tensors_in(value[STATE])):
        value = {key: item for key, item in value.items() if key not in (STATE, GROUPS)}
    found = {key: _beside(item, state, held) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None}
