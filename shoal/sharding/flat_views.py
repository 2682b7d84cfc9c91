"""Tensors as flat memory: a 1-D view of their elements in the order of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without holes or overlap, in whatever order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a 1-D view in the order of memory, without autograd."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def flat_like(value: Tensor, param: Tensor) -> Tensor:
    """The elements of ``value`` in the memory order of ``param``, which has the same shape.

    A view if ``value`` has the same memory order, else a copy. Sparse values become dense.
    """
    if value.layout is not torch.strided:
        value = value.to_dense()
    elif value.is_contiguous() and param.is_contiguous():
        return value.detach().view(-1)
    if value.stride() != param.stride() and not (value.is_contiguous() and param.is_contiguous()):
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
    return flat(value)


def shaped_like(elements: Tensor, param: Tensor) -> Tensor:
    """The inverse of :func:`flat`: the 1-D ``elements`` as a view in the shape and memory order of ``param``."""
    return elements.view(param.shape) if param.is_contiguous() else elements.as_strided(param.shape, param.stride())
