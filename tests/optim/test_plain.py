"""Each value that users, schedulers and numpy bring has one plain value, or none; and a plain value goes back into the
type of this peer's own object."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.plain import is_plain, plain, plain_or, restored, with_plain_numbers


class Text(str, enum.Enum):  # noqa: UP042 - what most people write
    A, B = "a", "b"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Flags(enum.IntFlag):
    X, Y = 1, 2


class Kind(enum.Enum):
    ONE, PAIR = "one", (1.0, 2.0)


class Mine(str):
    pass


Betas = namedtuple("Betas", ["first", "second"])

HAVE_ONE: list[tuple[Any, Any]] = [
    (np.float64(0.1), 0.1),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float16(0.5), 0.5),
    (np.longdouble(0.25), 0.25),
    (np.int64(7), 7),
    (np.uint8(7), 7),
    (np.bool_(True), True),
    (np.str_("text"), "text"),
    (np.bytes_(b"bytes"), b"bytes"),
    (np.array(0.5), 0.5),
    (np.array([0.5]), 0.5),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([3]), 3),
    (Fraction(1, 2), 0.5),
    (Text.B, "b"),
    (Level.HIGH, 2),
    (Flags.X | Flags.Y, 3),
    (Kind.ONE, "one"),
    (Kind.PAIR, [1.0, 2.0]),
    (Mine("text"), "text"),
    ((np.float64(0.9), 0.99), [0.9, 0.99]),
    (Betas(0.9, np.float32(0.5)), [0.9, 0.5]),
    ({"a": np.int32(1), Text.B: (1, 2)}, {"a": 1, "b": [1, 2]}),
    (Counter({np.int64(3): 1}), {3: 1}),
    (torch.Size([2, 3]), [2, 3]),
]


def exact_types(value: Any) -> bool:
    if isinstance(value, list):
        return type(value) is list and all(map(exact_types, value))
    if isinstance(value, dict):
        return type(value) is dict and all(exact_types(key) and exact_types(item) for key, item in value.items())
    return type(value) in (bool, int, float, str, bytes, type(None))


@pytest.mark.parametrize(("value", "wanted"), HAVE_ONE, ids=repr)
def test_values_that_have_a_plain_value(value: Any, wanted: Any) -> None:
    found = plain(value)
    assert found == wanted
    assert type(found) is type(wanted)
    assert exact_types(found)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == wanted


@pytest.mark.parametrize(
    "value",
    [
        object(), print, 1j, np.complex128(1j), torch.tensor(1j), torch.zeros(2), np.zeros(2), torch.float32,
        Decimal("0.1"), {1, 2}, deque([1]), 1 << 64, "\ud800", np.datetime64("2026-01-01"), Fraction(10**400),
        torch.zeros((), device="meta"), [object()], {"a": print},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_have_none(value: Any) -> None:
    assert not is_plain(value)
    assert plain_or(value, otherwise="none") == "none"


def test_values_that_hold_themselves_have_none() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert not is_plain(endless)


@pytest.mark.parametrize(("mine", "value"), HAVE_ONE, ids=repr)
def test_a_plain_value_goes_back_into_the_type_of_this_peers_own(mine: Any, value: Any) -> None:
    back = restored(value, mine, "option")
    assert type(back) is type(mine)
    assert plain(back) == value


@pytest.mark.parametrize(
    ("value", "mine", "wanted"),
    [
        (0.1, np.float32(0.5), 0.1),  # float32 does not hold it: peers would step with unlike numbers
        (0.5, np.int64(1), 0.5),
        (0.5, 1, 0.5),
        (2, 0.5, 2),
        (0.5, None, 0.5),
        ([0.9, 0.99], (0.1, 0.2), (0.9, 0.99)),
        ([[1.0, 2.0], [3.0, 4.0]], ((0.0, 0.0), (0.0, 0.0)), ((1.0, 2.0), (3.0, 4.0))),
        ({"a": [1]}, OrderedDict(a=(0,)), OrderedDict(a=(1,))),
        ({"a": 1}, defaultdict(int), {"a": 1}),
        ("b", Text.A, Text.B),
        (2, Level.LOW, Level.HIGH),
    ],
    ids=repr,
)
def test_other_values_than_this_peers_own(value: Any, mine: Any, wanted: Any) -> None:
    back = restored(value, mine, "option")
    assert back == wanted
    assert type(back) is type(wanted) or type(back) is type(mine)
    assert plain(back) == value


@pytest.mark.parametrize(
    ("value", "mine"),
    [("0.1", 0.1), (0.1, "text"), (True, 0.1), (0.1, np.bool_(True)), ([1], 1), (1, (1,)), ("c", Text.A),
     (9, Level.LOW), ({}, [1]), (b"", "a"), ("a", torch.tensor(1.0))],
    ids=repr,
)  # fmt: skip
def test_another_kind_is_refused_by_name(value: Any, mine: Any) -> None:
    with pytest.raises(ValueError, match=r"^betas is "):
        restored(value, mine, "betas")


leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
trees = st.recursive(leaves, lambda some: st.lists(some) | st.dictionaries(st.text(), some), max_leaves=10)


@given(trees)
def test_plain_data_stays_as_it_is(tree: Any) -> None:
    assert is_plain(tree)  # Hypothesis draws no lone surrogates
    assert plain(tree) == tree
    assert restored(tree, tree, "option") == tree


def test_steps_get_pythons_numbers() -> None:
    assert type(with_plain_numbers(np.float32(0.5))) is float
    assert with_plain_numbers((np.float64(0.9), 0.5)) == (0.9, 0.5)
    assert type(with_plain_numbers((np.float64(0.9), 0.5))[0]) is float
    for value in (0.5, Level.LOW, Text.A, (0.9, 0.5), torch.tensor(0.5), None, "a"):
        assert with_plain_numbers(value) is value
