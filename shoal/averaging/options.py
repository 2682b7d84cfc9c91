"""What `DecentralizedAverager` is given: which arguments make sense, and which are not built yet."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal import __version__

# Arguments of the reference that are not built yet, each with the values that change nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "initial_group_bits": ("",),
    "request_timeout": (3.0,),
    "averaging_alpha": (1.0,),
    "part_size_bytes": (2**19,),
    "sender_timeout": (None,),
    "reducer_timeout": (None,),
    "tensor_infos": (None,),
    "min_vector_size": (0,),
    "declare_state_period": (30,),
    "daemon": (True,),
}
NOT_BUILT_IN_STEP: Mapping[str, tuple[Any, ...]] = {"require_trigger": (False,)}


def refuse_not_built(arguments: Mapping[str, Any], not_built: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise NotImplementedError that names the arguments that do not work yet."""
    asked = [f"{name}={arguments[name]!r}" for name, unset in not_built.items() if arguments[name] not in unset]
    if asked:
        raise NotImplementedError(f"shoal {__version__} does not have {', '.join(asked)} yet: leave it at its default")


def check_group(target: int | None, least: int) -> None:
    """Raise ValueError if a group can't have so many members."""
    if target is not None and target < least:
        raise ValueError(f"target_group_size={target} is less than min_group_size={least}")


def check_role(client_mode: bool, auxiliary: bool, bandwidth: float | None) -> None:
    """Raise ValueError if a peer can't be all that."""
    if client_mode and auxiliary:
        raise ValueError("an auxiliary averager lends its bandwidth, a client has none to lend: choose one of the two")
    if bandwidth is not None and not 0 <= bandwidth < math.inf:
        raise ValueError(f"bandwidth={bandwidth}: give a number that is not negative")


def check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if one can't be averaged."""
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise ValueError(f"averaged_tensors[{index}] is of {tensor.dtype}: only floating point can be averaged")


def term_of(spec: str) -> str:
    """A compression's `spec` as peers compare it: itself, or its beginning and its hash if it is long."""
    if len(spec) <= 200:
        return spec
    return f"{spec[:160]}… ({hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()})"


def check_weight(weight: object, auxiliary: bool) -> None:
    """Raise ValueError if a peer's tensors can't count so much in a mean."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e15:
        raise ValueError(f"weight={weight!r}: give a number that is not negative, at most 1e15")
    if auxiliary and weight:
        raise ValueError(f"weight={weight!r}: an auxiliary averager contributes nothing")
