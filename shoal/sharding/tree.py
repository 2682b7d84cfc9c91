"""Nested values as JSON and tensors, to send from one rank to another without pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """The part of ``value`` that JSON can represent; appends the tensors in it to ``tensors``.

    Raises:
        TypeError: for a value that is no tensor, number, string or None, and no list, tuple or dictionary of these.
    """
    if type(value) in (Tensor, Parameter):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [encode(v, tensors) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(name, tensors), encode(entry, tensors)] for name, entry in value.items()]}
    raise TypeError(
        f"the optimizer's state holds a {type(value).__name__}, which cannot go to another rank: "
        "keep tensors, numbers, strings, and lists, tuples and dictionaries of them"
    )


def decode(data: Any, receive: Callable[[torch.dtype, tuple[int, ...]], Tensor]) -> Any:
    """The inverse of :func:`encode`. ``receive`` returns the tensors, in their order.

    Raises:
        ValueError: if ``data`` did not come from :func:`encode`.
    """
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"an encoded value has one key, got {list(data)!r:.80}")
    ((kind, content),) = data.items()
    if kind == "tensor":
        dtype = getattr(torch, content[0], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no dtype {content[0]!r:.40}")
        return receive(dtype, tuple(content[1]))
    if kind in ("list", "tuple"):
        items = [decode(item, receive) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {decode(name, receive): decode(entry, receive) for name, entry in content}
    raise ValueError(f"an encoded value is a tensor, list, tuple or dict, got {kind!r:.40}")
