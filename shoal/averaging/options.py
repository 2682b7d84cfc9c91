"""The texts that peers compare when they meet: of compressions, and of the shapes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shoal.swarm.protocol.tensors import Tensors


def term_of(spec: str) -> str:
    """A compression's `spec` as peers compare it. A long one is shortened to its beginning and its hash."""
    if len(spec) <= 200:
        return spec
    return f"{spec[:160]}… ({hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()})"


def described(kind: str, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> Tensors:
    """The dtypes and shapes of the tensors, as peers describe them to each other."""
    return Tensors(kind, [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors], names)
