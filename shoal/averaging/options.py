"""What peers compare when they meet: compressions, and shapes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shoal.swarm.protocol.tensors import Tensors


def term_of(spec: str) -> str:
    """A compression's `spec` as peers compare it: if it is long, its beginning and its hash."""
    if len(spec) <= 200:
        return spec
    return f"{spec[:160]}… ({hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()})"


def described(kind: str, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Tensors:
    """The tensors as peers describe them to each other."""
    return Tensors(kind, [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors], names)
