"""What the constructor of `ZeroRedundancyOptimizer` is given, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

Partition = Literal["auto", "elements", "parameters"]


def checked(params: Any) -> list[Any]:
    """The tensors or parameter groups in ``params``.

    Raises:
        TypeError: if it is no iterable of such.
        ValueError: if it is empty, or a group has no parameters.
    """
    if isinstance(params, Tensor):
        raise TypeError("params is an iterable of tensors or parameter groups, got one tensor: put it in a list")
    if not isinstance(params, Iterable):
        raise TypeError(f"params is an iterable of tensors or parameter groups, got {type(params).__name__}")
    given = list(params)
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got no parameters")
    groups = [entry for entry in given if isinstance(entry, dict)]
    for group in groups:
        if "params" not in group:
            raise ValueError("a parameter group has a key 'params'")
    if groups and len(groups) < len(given):
        raise TypeError("params is an iterable of tensors or of parameter groups, not of both")
    return given


def may_cut(partition: Partition, element_wise: bool, world_size: int) -> bool:
    """Whether shares may begin and end inside a parameter.

    Raises:
        ValueError: if there is no such partition.
    """
    if partition == "auto":
        return element_wise and world_size > 1
    if partition not in ("elements", "parameters"):
        raise ValueError(f"partition is 'auto', 'elements' or 'parameters', got {partition!r}")
    return partition == "elements"
