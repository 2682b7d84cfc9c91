"""The typed tree: each value comes out as the type that it went in, equal trees have equal bytes, and nothing that
arrives does more than to be refused."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.optim import tree
from shoal.optim.tree import CannotTravel, _Kind, decode, encode

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Of:
    """An object of a class of its own."""

    def __init__(self, rank: int, matrix: Tensor) -> None:
        self.rank, self.matrix = rank, matrix


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    raw = torch.arange(torch.Size(shape).numel()) % 2
    made = raw.to(torch.uint8).view(shape).to(draw(st.sampled_from(DTYPES)))
    if made.dim() == 3 and draw(st.booleans()):
        made = made.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if made.is_floating_point() and made.itemsize > 1 and draw(st.booleans()):
        made = nn.Parameter(made, draw(st.booleans()))
    return made


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), st.complex_numbers(),
    st.text(st.characters(categories=["Cs", "L"]), max_size=5),
    st.sampled_from([torch.float32, torch.uint16, torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu")]),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.uint64(1 << 63)]),
)  # fmt: skip
keys = st.one_of(numbers, st.tuples(numbers, numbers), st.frozensets(st.integers(), max_size=3)).filter(
    lambda key: "nan" not in repr(key)  # which equals no copy of itself
)


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entries = st.dictionaries(keys, values, max_size=4)
    return st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.lists(values, min_size=1, max_size=4).map(lambda one: [one, one]),
        entries,
        entries.map(OrderedDict),
        entries.map(lambda one: defaultdict(list, one)),
        st.builds(Counter, st.lists(st.integers(), max_size=4)),
        st.sets(keys, max_size=4),
        st.builds(deque, st.lists(values, max_size=4), st.sampled_from([None, 4, 9])),
    )


trees = st.recursive(numbers | tensors(), containers, max_leaves=12)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in every respect that a state may have."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        contiguous = one.is_contiguous() == other.is_contiguous()
        bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return alike and contiguous and torch.equal(*bits)
    if isinstance(one, list | tuple | deque):
        bounds = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return bounds and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
            return False
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float | complex | np.generic):
        return repr(one) == repr(other)
    return bool(one == other)


def there_and_back(value: Any, mine: Any = None) -> Any:
    places: list[Tensor] = []
    encoded = encode(value, places)
    copies = [t.detach().view(tree.carrier(t.dtype)).clone().contiguous() for t in places]
    again: list[Tensor] = []
    back = decode(encoded, copies, mine)
    assert encode(back, again) == encoded, "a newcomer's own tree has the donor's bytes"
    return back


@given(trees)
@example({1: 2, "a": float("nan"), -0.0: complex(-0.0, float("inf"))})
def test_it_comes_out_as_it_went_in(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(st.dictionaries(keys, st.integers(), min_size=2), st.randoms(use_true_random=False))
def test_equal_trees_have_equal_bytes(value: dict[Any, int], chance: random.Random) -> None:
    entries = list(value.items())
    chance.shuffle(entries)
    assert encode(dict(entries), []) == encode(value, [])
    assert encode(set(dict(entries)), []) == encode(set(value), [])


def test_what_is_shared_stays_shared() -> None:
    table, one = torch.linspace(0, 1, 16), [1]
    across, own = torch.ones(3, 2).t(), nn.Parameter(torch.ones(2))
    one_of = {"table": table, "one": one, "across": across, "own": own}
    back = there_and_back({"a": one_of, "b": dict(one_of, table=table.view(16))})
    for name in ("table", "across", "own"):
        assert back["a"][name] is back["b"][name]
    assert back["a"]["one"] is back["b"]["one"]
    places = [torch.zeros(3)]
    encode({"same": places[0]}, places)
    assert len(places) == 1, "a parameter in the state is the parameter"


def test_what_a_class_brings_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_pairs", {})
    value = {"projector": Of(4, torch.ones(2, 2))}
    with pytest.raises(CannotTravel, match=r"\('projector',\) is a tests.optim.test_tree.Of"):
        encode(value, [])
    tree.travels(Of, "Of", lambda one: {"rank": one.rank, "matrix": one.matrix}, lambda given: Of(**given))
    back = there_and_back(value)["projector"]
    assert type(back) is Of
    assert back.rank == 4
    with pytest.raises(ValueError, match="another class has it"):
        tree.travels(Colour, "Of", int, Colour)
    encoded = encode(value, [])
    monkeypatch.setattr(tree, "_pairs", {})
    with pytest.raises(ValueError, match="no pair of functions"):
        decode(encoded, [torch.ones(2, 2)])


def test_members_and_named_tuples_need_this_peers_own() -> None:
    value = {"colour": Colour.RED, "at": [Point(1, 2.0)]}
    assert same(there_and_back(value, {"colour": Colour.RED, "at": [Point(0, 0)]}), value)
    for mine in (None, {"colour": 1, "at": [(0, 0)]}):
        with pytest.raises(ValueError, match="this peer's optimizer has n"):
            decode(encode(value, []), [], mine)


def loop() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(tree.MAX_DEPTH + 2):
        value = [value]
    return value


BASE = torch.zeros(8)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (loop(), r"\(0, 'again'\) is a part of itself"),
        (deep(), "nested more than 32 deep"),
        (torch.ones(1).expand(4), "share their memory"),
        ([BASE[:5], BASE[3:]], r"\(1,\) is a tensor that shares a part of its memory with \(0,\)"),
        ({"at": torch.Generator()}, r"\('at',\) is a torch._C.Generator"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (defaultdict(lambda: 1), "a defaultdict of"),
        (np.zeros(3), "numpy.ndarray"),
        (1 << 2000, "a whole number of 251 bytes"),
        ({torch.ones(1): 1}, "a tensor for a key"),
        (torch.empty(1, device="meta"), "on meta"),
        (lambda: 1, "function"),
        (bytearray(b"x"), "bytearray"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_travel_is_refused_by_name_and_path(value: Any, says: str) -> None:
    with pytest.raises(CannotTravel, match=says):
        encode(value, [])


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotTravel, match="more than 1048576 values"):
        encode([0] * (tree.MAX_NODES + 1), [])
    with pytest.raises(ValueError, match="more than 1048576 values"):
        decode(msgspec.msgpack.encode([0, *[0] * (tree.MAX_NODES + 1)]), [])
    nested: Any = 0
    for _ in range(100):
        nested = [0, nested]
    with pytest.raises(ValueError, match="deeper than 32"):
        decode(msgspec.msgpack.encode(nested), [])
    for _ in range(100_000):
        nested = [0, nested]
    monkeypatch.setattr(tree, "MAX_BYTES", 100)
    with pytest.raises(CannotTravel, match="more than 100"):
        encode("x" * 200, [])
    with pytest.raises(ValueError, match="more than 100"):
        decode(b"\0" * 101, [])


HOSTILE = [
    [], [0.5], [99], [True, 1], [2, 1], [2, 1, 1, 1, 1], [2, [0], 1], [2, "b", 1, "a", 1], [6, 1, 1], [6, [0]],
    [8, 1, 1, 1], [8, -1], [8, "x"], [9, 0], [9, -1], [0, [9, 0]], [2, 1, [9, 0]], [9], [10, 0, "float32", []],
    [10, 5, "float32", []], [10, 0, "x", []], [10, 0, "int64", [0, 0]], [10, 0, "int64", [1]], [10, 0, "int64", None],
    [10, 0, "quint8", []], [11, True, 0, "int64", []], [11, 1, 0, "int64", []], [12, b"\1"], [12, b"\0" * 200],
    [12, 5], [13, 1, 1], [13], [14, "x"], [14, b"\xff"], [15, "x"], [15, 1], [16, -1], [16, *[1] * 100],
    [17, "x", None], [17, "cuda", -1], [17, "cuda", "0"], [18, "<f4", b"12"], [18, "O", b"12345678"],
    [19, "Colour", "RED"], [20, "Point", 1, 2], [21, "os.system", "ls"], [4, "eval"], [4], [3, 1], {"a": 1},
    [0, {"a": 1}], [1, [5, [1, [0]], 1]],
]  # fmt: skip


@pytest.mark.parametrize("node", HOSTILE, ids=lambda node: "")
def test_what_is_no_tree_is_refused(node: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(msgspec.msgpack.encode(node), [torch.zeros(2, 2, dtype=torch.int64)])


@given(trees, st.data())
def test_what_arrives_changed_is_refused_or_is_a_tree(value: Any, data: st.DataObject) -> None:
    places: list[Tensor] = []
    encoded = bytearray(encode(value, places))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = decode(bytes(encoded), places)
    except ValueError:
        return
    encode(back, [])


def test_a_parameter_can_be_a_key() -> None:
    mine, theirs = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    tensors: list[torch.Tensor] = [mine]
    encoded = encode({"rest": {mine: {"base": torch.ones(3)}}}, tensors)
    back = decode(encoded, [theirs, tensors[1]])
    assert list(back["rest"]) == [theirs]
    assert next(iter(back["rest"])) is theirs
    assert encode(back, [theirs]) == encoded
    with pytest.raises(ValueError, match="reference to tensor 0 of 0"):
        decode(encoded, [])


def test_what_is_met_again_counts_as_often_as_it_is_read() -> None:
    """Else a few bytes are a value that nobody can walk through."""
    bomb: Any = [1]
    for _ in range(21):
        bomb = [bomb, bomb]
    with pytest.raises(CannotTravel, match="has more than 1048576 values"):
        encode(bomb, [])
    sent: Any = [_Kind.LIST, 1]
    for level in range(21):  # list k holds list k + 1 twice
        sent = [_Kind.LIST, sent, [_Kind.AGAIN, 21 - level]]
    with pytest.raises(ValueError, match="a tree of more than 1048576 values"):
        decode(msgspec.msgpack.encode(sent), [])


@pytest.mark.parametrize("odd", [lambda n: n * ((1 << 61) - 1) + (1 << 70), lambda n: (n, n), complex])
def test_keys_with_one_hash_are_few(odd: Any) -> None:
    with pytest.raises(CannotTravel, match="keys that are no texts"):
        encode({odd(n): n for n in range(tree.MAX_ODD_KEYS + 1)}, [])
    assert encode({odd(n): n for n in range(100)}, [])
