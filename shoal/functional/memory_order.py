"""The order of elements in memory, on which some kernels depend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DENSE_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def by_place(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the tensors of each (dtype, device), in the order of the first tensor of each."""
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(places.values())


def alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of every row are dense and have their elements in the same order."""
    if all([tensor.is_contiguous() for column in columns for tensor in column]):  # noqa: C419 - faster than a generator
        return True
    return not unalike_rows(columns)


def unalike_rows(columns: Sequence[Sequence[Tensor]]) -> list[int]:
    """The rows in which :func:`alike` does not hold."""
    return [row for row, tensors in enumerate(zip(*columns, strict=True)) if not _row_is_alike(tensors)]


def _row_is_alike(tensors: tuple[Tensor, ...]) -> bool:
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    first = tensors[0]
    dense = first.dim() in _DENSE_FORMATS and first.is_contiguous(memory_format=_DENSE_FORMATS[first.dim()])
    return dense and all(tensor.stride() == first.stride() for tensor in tensors)
