"""What `DecentralizedAverager` is given: which arguments make sense."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from shoal.averaging.control import check_weight
from shoal.compression import CompressionInfo
from shoal.swarm.protocol.tensors import Tensors


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


def check_bits(bits: object) -> None:
    """Raise ValueError if they are no group bits."""
    if not isinstance(bits, str) or set(bits) - {"0", "1"} or len(bits) > 64:
        raise ValueError(f'group bits {bits!r}: give a text of at most 64 "0"s and "1"s')


def check_tensors(tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo] | None) -> None:
    """Raise ValueError if one can't be averaged, or `infos` are not of these tensors."""
    if infos is not None and [(i.shape, i.dtype) for i in infos] != [(tuple(t.shape), t.dtype) for t in tensors]:
        raise ValueError("tensor_infos must have one for each of averaged_tensors, of its shape and dtype")
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise ValueError(f"averaged_tensors[{index}] is of {tensor.dtype}: only floating point can be averaged")


def term_of(spec: str) -> str:
    """A compression's `spec` as peers compare it: itself, or its beginning and its hash if it is long."""
    if len(spec) <= 200:
        return spec
    return f"{spec[:160]}… ({hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()})"


def described(kind: str, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Tensors:
    """These tensors as peers describe them to each other."""
    return Tensors(kind, [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors], names)


def check_weight_of_role(weight: float, auxiliary: bool) -> None:
    """Raise ValueError if such a peer's tensors can't count so much in a mean."""
    if check_weight(weight) and auxiliary:
        raise ValueError(f"weight={weight!r}: an auxiliary averager contributes nothing")
