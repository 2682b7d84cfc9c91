"""Options and counters as plain data that can be sent, and back into the types that torch had."""

from __future__ import annotations

import numbers
from collections import Counter
from typing import Any

import torch


def plain(value: Any) -> Any:
    """`value` without tensors: those of one element become numbers. Raises TypeError, with the type, for what can't be
    sent."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, numbers.Real):  # numpy's
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def restored(value: Any, mine: Any, name: str) -> Any:
    """`value`, which somebody else's `plain` made, in the type that this peer has there (`mine`).

    Raises ValueError, with the `name`, if a number, text, list or dict stands where this peer has something else.
    """
    if isinstance(mine, torch.Tensor):
        if not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r:.40}, and a number at this peer")
        return torch.full_like(mine, value)
    kinds: tuple[Any, ...] = (bool, (int, float), str, bytes, (list, tuple), dict)
    for kind in kinds:
        if isinstance(mine, kind):
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r:.40}, and {mine!r:.40} at this peer")
            break
    return type(mine)(value) if isinstance(mine, tuple | Counter) else value
