"""Whether two values of an optimizer's state are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def are_equal(some: Any, others: Any) -> bool:
    """Whether two values are equal: numbers, text and the like, tensors of one dtype and shape, and lists, tuples and
    mappings of these. Tensors may be on several devices.
    """
    if isinstance(some, Tensor) and isinstance(others, Tensor):
        alike = some.dtype is others.dtype and some.shape == others.shape
        return alike and bool(torch.equal(some.detach().cpu(), others.detach().cpu()))
    if isinstance(some, Mapping) and isinstance(others, Mapping):
        return some.keys() == others.keys() and all(are_equal(value, others[key]) for key, value in some.items())
    if isinstance(some, list | tuple) and isinstance(others, list | tuple):
        return len(some) == len(others) and all(map(are_equal, some, others))
    return type(some) is type(others) and bool(some == others)
