"""A digest says whether peers have the same bits."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3
from torch import Tensor

from shoal.flat import bytes_of


def digest_of(tensors: Iterable[Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(bytes_of(tensor.detach().contiguous()))
    return hasher.hexdigest()
