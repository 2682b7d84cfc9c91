"""One plain value for each value that users, schedulers and other libraries bring: what can be sent, and compared among
peers. A plain value is None, a bool, int, float, str or bytes of exactly that type, or a list or dict of plain values.

[Note: the border] Users give numbers of numpy, members of enumerations, tensors with one element. `plain` reads one
plain value of each where it comes in. Behind that there are no other types. The user's object stays where it is.
`restored` goes the other way: it gives a plain value of another peer the type of this peer's own object.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

MAX_DEPTH = 32  # of lists and dictionaries within each other
LEAST_INT, MOST_INT = -(1 << 63), (1 << 64) - 1  # what msgpack can hold
WANTED = "a number, a text, a bool, None, or a list, tuple or dictionary of these"

_EXACT = (float, int, bool, str, type(None), bytes)


def plain(value: Any, depth: int = 0) -> Any:
    """Return the plain value of `value`.

    Numbers of other libraries and subclasses of Python's become Python's. Members of an enumeration become their value.
    Tensors and arrays with one element become numbers. Tuples become lists.

    Raises:
        TypeError: if there is none, with the name of the type that has none.
    """
    if type(value) in _EXACT:
        return _encodable(value)
    if isinstance(value, Enum):
        return plain(value.value, depth + 1)
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {plain(key, depth + 1): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, str):
        return _encodable(str.__str__(value))
    try:
        if isinstance(value, numbers.Real):  # numpy's longdouble has an `item` that returns another longdouble
            return _encodable(int(value) if isinstance(value, numbers.Integral) else float(value))
        if has_one_item(value):
            return plain(value.item(), depth + 1)
    except (OverflowError, RuntimeError) as error:  # too large a number; a tensor without values
        raise TypeError(f"there is a {type(value).__name__} in it that has no value: {error}") from error
    raise TypeError(f"there is a {type(value).__name__} in it")


def plain_or(value: Any, otherwise: Any = None) -> Any:
    """Return the plain value of `value`, or `otherwise` if there is none."""
    try:
        return plain(value)
    except TypeError:
        return otherwise


def is_plain(value: Any) -> bool:
    """Whether there is a plain value of `value`."""
    return plain_or(value, otherwise=plain) is not plain


def has_one_item(value: Any) -> bool:
    """Whether `value` is a tensor, an array or a scalar (of torch, numpy or another library) with one element."""
    return callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None and _count(value) == 1


def can_hold(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a tensor with one element can hold that number: one of whole numbers holds no fractions."""
    return tensor.is_floating_point() or (isinstance(value, int | float) and value == value // 1)


def restored(value: Any, mine: Any, name: str) -> Any:
    """Give a plain value of another peer the type of `mine`, this peer's own value. A number keeps its value: if the
    type of `mine` can't hold it exactly, it stays Python's.

    Raises:
        ValueError: with the `name`, if the two are of different kinds (number, text, list, dictionary), or if there is
            no such member of an enumeration.
    """
    if isinstance(mine, torch.Tensor) and mine.numel() == 1:
        if not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r:.40}, and a number at this peer")
        return torch.full_like(mine, value, dtype=None if can_hold(mine, value) else torch.float32)
    if mine is None or (type(value) is type(mine) and not isinstance(mine, list | dict)):
        return value
    own = plain_or(mine, otherwise=mine)
    if _kind(value) != _kind(own):
        raise ValueError(f"{name} is {value!r:.40}, and {mine!r:.40} at this peer")
    if isinstance(mine, Enum):
        return _member(value, mine, name)
    if isinstance(mine, Mapping):
        return _like_mapping({key: restored(v, mine.get(key), name) for key, v in value.items()}, mine)
    if isinstance(mine, list | tuple):
        items = [restored(item, mine[n] if n < len(mine) else None, name) for n, item in enumerate(value)]
        return _like_sequence(items, mine)
    return _like_scalar(value, mine)


def with_plain_numbers(value: Any) -> Any:
    """Return `value` with Python's numbers in place of numpy's, also in a list or tuple. Returns `value` itself if it
    has none."""
    if type(value) in _EXACT or isinstance(value, torch.Tensor | Enum):
        return value
    if isinstance(value, list | tuple):
        items = [with_plain_numbers(item) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else _like_sequence(items, value)
    return plain(value) if isinstance(value, numbers.Real) or has_one_item(value) else value


def are_alike(value: Any, mine: Any) -> bool:
    """Whether two plain values are of the same kind, so that a step can have one if it can have the other."""
    if isinstance(value, list) and isinstance(mine, list):
        return len(value) == len(mine) and all(map(are_alike, value, mine))
    if isinstance(value, dict) and isinstance(mine, dict):
        return value.keys() == mine.keys() and all(are_alike(value[key], mine[key]) for key in mine)
    return type(value) is type(mine) or {type(value), type(mine)} == {int, float}


def _encodable(value: Any) -> Any:
    """Return the value, of an exact type, if msgpack can hold it."""
    if type(value) is int and not LEAST_INT <= value <= MOST_INT:
        raise TypeError("there is a whole number of more than 64 bits in it")
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TypeError("there is a text in it that is not Unicode") from error
    return value


def _count(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else int(value.size)


def _kind(value: Any) -> type:
    """Numbers are one kind. A bool is another one."""
    for kind in (bool, str, bytes, list, dict):
        if isinstance(value, kind):
            return kind
    return float if isinstance(value, int | float) else type(value)


def _member(value: Any, mine: Enum, name: str) -> Any:
    for member in type(mine):
        if plain_or(member) == value:
            return member
    try:
        return type(mine)(value)  # flags that are combined
    except ValueError as error:
        raise ValueError(f"{name} is {value!r:.40}, and a {type(mine).__name__} at this peer") from error


def _like_mapping(items: dict[Any, Any], mine: Mapping[Any, Any]) -> Any:
    if type(mine) is dict or not hasattr(mine, "clear"):
        return items
    made: Any = copy.copy(mine)  # a defaultdict keeps its factory
    made.clear()
    made.update(items)
    return made


def _like_sequence(items: list[Any], mine: list[Any] | tuple[Any, ...]) -> Any:
    if isinstance(mine, list):
        return items
    with contextlib.suppress(TypeError):
        made = type(mine)(items)
        if len(made) == len(items) and all(a is b for a, b in zip(made, items, strict=True)):
            return made
    return type(mine)(*items)  # a namedtuple


def _like_scalar(value: Any, mine: Any) -> Any:
    """The value in the type of `mine`, a subclass of Python's types or an object with one item, if that holds it."""
    try:
        if hasattr(mine, "__setitem__"):  # an array; its type takes a shape
            made = copy.copy(mine)
            made[...] = value
        else:
            made = type(mine)(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return made if plain_or(made) == value else value
