"""The format of state dicts, and which part of one each slice takes. The format is torch.optim's, for any number of
ranks.

A state dict has one entry per parameter, numbered through all groups. State that has one number per element is a tensor
of the parameter's shape. torch's own `ZeroRedundancyOptimizer` consolidates into the same format. So a state dict knows
nothing of ranks and spans. It loads on any number of ranks, and into the plain optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from shoal.flat import is_per_tensor
from shoal.sharding.flat_views import flat_like
from shoal.sharding.shard import Piece, Shard
from shoal.sharding.sharded_state import ShardedState

StateDict = dict[str, Any]


def pack_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups as a state dict has them: options, and numbers in place of parameters."""
    packed = []
    number = 0
    for group in groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        packed.append({**{name: value for name, value in group.items() if name != "params"}, "params": numbers})
    return packed


def is_per_element(name: str, value: Any, piece: Piece) -> bool:
    """Whether ``value``, an entry of the state of a piece, has one number for each element of the slice."""
    if not isinstance(value, Tensor) or is_per_tensor(name, value):
        return False
    return value.dim() > 0 and value.shape == piece.local.shape


def sharded(shard: Shard, params: Sequence[Tensor]) -> dict[Any, Any]:
    """The state of this rank's slices in the format of a state dict, with `ShardedState` where a parameter is cut, and
    this rank's state of no parameter.
    """
    # Checkpoints need an entry for every trained parameter, on every rank.
    state: dict[int, dict[str, Any]] = {n: {} for n, param in enumerate(params) if param.requires_grad}
    for piece in shard.all_pieces:
        entries = shard.state_of(piece)
        if entries and not piece.whole:
            entries = {
                name: ShardedState.of(piece.param.shape, [(piece.part.span, value)])
                if is_per_element(name, value, piece)
                else value
                for name, value in entries.items()
            }
        if entries:
            state[piece.part.tensor] = entries
    return dict(sorted(state.items())) | shard.of_none


def read(
    state_dict: StateDict, groups: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Piece]], *, element_wise: bool
) -> tuple[list[list[dict[str, Any]]], dict[Any, Any], list[dict[str, Any]]]:
    """The state that each slice takes from ``state_dict``, as copies, that of no parameter, and the options of each
    group. Changes nothing.

    Args:
        state_dict: from Shoal's or torch's ``ZeroRedundancyOptimizer``, or from the plain optimizer.
        groups: the parameter groups to load into.
        pieces: this rank's slices, group by group.
        element_wise: whether all state has the shape of its parameter or is one number, so that shapes can be checked.

    Raises:
        ValueError: if the state dict does not fit. The message says where.
    """
    saved_groups, saved_state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(saved_groups, list) or not isinstance(saved_state, dict):
        raise ValueError("a state dict of an optimizer has a list 'param_groups' and a dictionary 'state'")
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, this optimizer has {len(groups)}")
    for number, (ours, theirs) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            raise ValueError(
                f"parameter group {number} has {len(theirs['params'])} parameters in the state dict and "
                f"{len(ours['params'])} in this optimizer"
            )
    keys = list(chain.from_iterable(group["params"] for group in saved_groups))
    if unknown := {key for key in saved_state if type(key) is int} - set(keys):
        raise ValueError(f"the state dict has state of {sorted(map(str, unknown))[:3]}, which are in no group")
    params = list(chain.from_iterable(group["params"] for group in groups))
    if element_wise:
        for key, param in zip(keys, params, strict=True):
            _check_shapes(key, param, saved_state.get(key) or {})
    states = [[_slice_state(piece, saved_state.get(keys[piece.part.tensor])) for piece in own] for own in pieces]
    options = [{name: value for name, value in group.items() if name != "params"} for group in saved_groups]
    of_none = copy.deepcopy({key: value for key, value in saved_state.items() if key not in set(keys)})
    return states, of_none, options


def _check_shapes(key: Any, param: Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() != 1 and value.shape != param.shape:
            raise ValueError(
                f"{name!r} of parameter {key!r} has shape {tuple(value.shape)} in the state dict, but the parameter "
                f"has {tuple(param.shape)}: it is of another model, or of other parameters in this order"
            )


def _slice_state(piece: Piece, state: dict[str, Any] | None) -> dict[str, Any]:
    return {name: _slice_value(piece, value) for name, value in (state or {}).items()}


def _slice_value(piece: Piece, value: Any) -> Any:
    if isinstance(value, ShardedState):
        elements = value.elements(piece.part.span)
        return elements.view(piece.param.shape) if piece.whole else elements
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if not piece.whole and value.dim() > 0 and value.shape == piece.param.shape:
        return flat_like(value, piece.param)[piece.part.span.slice].clone()
    if piece.is_copy and value.shape == piece.param.shape:
        return flat_like(value, piece.param).clone().view(piece.local.shape)
    return value.clone()
