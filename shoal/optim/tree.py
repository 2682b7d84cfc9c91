"""The typed tree: anything that an optimizer may keep in its state dict, as bytes and tensors. Each value comes out as
the type that it went in. Nothing is unpickled, and no class is imported by name.

[Note: the encoding] The bytes are msgpack. None, bools, floats, bytes, whole numbers of 64 bits and texts stand for
themselves. Every other value is an array that begins with its kind (`_Kind`). A tensor is its place in a list of
tensors, which go their own way; tensors that are one tensor, or that have the same memory, have one place. There is no
device in it. Entries of dictionaries and members of sets are in the order of their encodings. So equal trees have equal
bytes, whoever encodes them. A list, dictionary, set or deque that is met again is a reference to the first meeting.

Classes are not in it either. An object of a class that this library does not know travels with a pair of functions
(`travels`), or, for members of enumerations and named tuples, if the reader has one of the same class in the same
place. A tensor of a class of its own, such as a quantized one, travels as the tensors of which it consists
(`__tensor_flatten__`), if the module of the reader's optimizer names that class.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

MAX_DEPTH: Final = 32
MAX_NODES: Final = 1 << 20
MAX_BYTES: Final = 8 << 20
MAX_ODD_KEYS: Final = 4096
"""Keys and members of sets that are tuples, complex or large numbers and the like. Whoever sends a tree may choose such
keys with one hash, and then a dictionary compares each with each."""
MAX_INT_BYTES: Final = 128
MAX_MEMBERS: Final = 64
"""Members of a named tuple, and letters of the name of a class."""

Path: TypeAlias = tuple[Any, ...]
"""The way to a value: the keys of dictionaries and the numbers of items on it."""
Show: TypeAlias = Callable[[Path], str]
"""Names a path for an error message."""


def shown(path: Path) -> str:
    """The path for a message: a name, and what stands below it in brackets."""
    name, *below = path
    keys = ["a parameter" if isinstance(key, Tensor) else repr(key) for key in (name, *below)]
    return f"{keys[0]:.60}" + "".join(f"[{key:.40}]" for key in keys[1:])


class CannotTravel(ValueError):
    """There is a value that the tree can't hold. The message says which one, and where it is."""


class _Kind(IntEnum):
    """The first item of an array."""

    LIST = 0
    TUPLE = 1
    DICT = 2
    ORDERED_DICT = 3
    DEFAULT_DICT = 4
    COUNTER = 5
    SET = 6
    FROZENSET = 7
    DEQUE = 8
    AGAIN = 9  # a list, dictionary, set or deque that was met before: its number
    TENSOR = 10
    PARAMETER = 11
    INT = 12  # of more than 64 bits
    COMPLEX = 13
    TEXT = 14  # that is not Unicode
    DTYPE = 15
    SIZE = 16
    DEVICE = 17
    NUMPY = 18
    MEMBER = 19  # of an enumeration
    NAMED_TUPLE = 20
    OBJECT = 21  # of a class with a pair of functions
    WRAPPED = 22  # a tensor of a class of its own, which torch can take apart into tensors
    KEY = 23  # a tensor that has a place beforehand, such as a parameter: only a key of a dictionary, or in a set


_DTYPES: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}  # fmt: skip
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CARRIABLE: Final = frozenset(
    _DTYPES[name]
    for name in ("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                 "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if name in _DTYPES
)  # fmt: skip
_CARRIED: Final = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
"""The dtypes that flat memory has. Tensors of others go as whole numbers of their size."""
_DEVICES: Final = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "privateuseone", "meta")
_OPEN: Final = object()
_FACTORIES: Final = {"": None, "list": list, "dict": dict, "set": set, "int": int, "float": float}
_NUMPY: Final = ("|b1", *(f"{'|' if n == 1 else '<'}{kind}{n}" for kind in "iu" for n in (1, 2, 4, 8)), "<f2", "<f4",
                 "<f8", "<c8", "<c16")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """How objects of a class travel.

    Attributes:
        name: of the class, on the wire.
        of: makes a value of the tree of an object.
        back: makes an object of that value. It must check what it gets: anybody may have sent it.
    """

    name: str
    of: Callable[[Any], Any]
    back: Callable[..., Any]


_pairs: dict[type, Pair] = {}


def travels(kind: type, name: str, of: Callable[[Any], Any], back: Callable[..., Any]) -> None:
    """Let objects of exactly that class, which an optimizer keeps in its state or its options, travel to newcomers and
    to files. For a class of optimizers: let what it keeps outside of its state and its options travel, for all classes
    that derive from it, too.

    Call this in every peer's script, before the `Optimizer` is made. What peers have sent is never unpickled, and no
    method of the class gets it: only `back`.

    Args:
        kind: the class.
        name: names it to peers; the same at all of them, at most 64 letters.
        of: ``of(object)`` returns what the object consists of: tensors, numbers, lists, dictionaries and the like.
        back: ``back(value)`` makes an object of that. For a class of optimizers, ``back(optimizer, value)`` puts the
            value into the optimizer. The value may come from anybody: raise ValueError if it makes no sense.

    Raises:
        ValueError: if the name is too long, or another class has it.
    """
    if not 0 < len(name) <= MAX_MEMBERS or any(pair.name == name for one, pair in _pairs.items() if one is not kind):
        raise ValueError(f"{name!r} is too long for the name of a class (64 letters), or another class has it")
    _pairs[kind] = Pair(name, of, back)


def pair_of(kind: type[torch.optim.Optimizer]) -> Pair | None:
    """How what optimizers of that class keep outside of their state travels; None if nobody has said."""
    for one in kind.__mro__:
        if one in _pairs:
            return _pairs[one]
        if "state_dict" in vars(one):  # it saves more than the class for which somebody has said it
            break
    return None


# -- encoding


def encode(value: Any, tensors: list[Tensor], show: Show = str) -> bytes:
    """Encode a tree.

    Args:
        value: the tree.
        tensors: the tensors that have places already, parameters for example. Those of the tree are added.
        show: names a path, for the message of an error.

    Raises:
        CannotTravel: if something in it can't be encoded, or if it is too large.
    """
    encoded = _pack(_Encoder(tensors, show).node(value, ()))
    if len(encoded) > MAX_BYTES:
        raise CannotTravel(f"{show(())} takes {len(encoded)} bytes without its tensors, more than {MAX_BYTES}")
    return encoded


class _Encoder:
    def __init__(self, tensors: list[Tensor], show: Show) -> None:
        self._tensors, self._show = tensors, show
        self._given = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._places = {memory_of(tensor): place for place, tensor in enumerate(tensors)}
        self._spans = _Spans()
        for place, tensor in enumerate(tensors):
            self._spans.add(tensor, (f"tensor {place}",))
        self._met: dict[int, int] = {}  # by id of a list, dictionary, set or deque: its number
        self._sizes: list[int] = []  # by number: the values in it, as often as they are met when it is read
        self._odd_keys = 0
        self._open: set[int] = set()  # the ids of those on the way to the present value
        self._kept: list[Any] = []  # so that no id is used twice
        self._nodes = 0

    def node(self, value: Any, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise CannotTravel(f"{self._show(())} has more than {MAX_NODES} values")
        if len(path) > MAX_DEPTH:
            raise CannotTravel(f"{self._show(path[:3])} is nested more than {MAX_DEPTH} deep")
        kind = type(value)
        if kind in _PLAIN:
            return _plain_node(value, lambda why: self._refusal(path, why))
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind in _pairs and not issubclass(kind, torch.optim.Optimizer):
            pair = _pairs[kind]
            return [_Kind.OBJECT, pair.name, self.node(pair.of(value), (*path, pair.name))]
        if kind in (list, dict, OrderedDict, defaultdict, Counter, set, deque):
            return self._container(value, path)
        if kind is tuple:
            return [_Kind.TUPLE, *self._items(value, path)]
        if kind is frozenset:
            return [_Kind.FROZENSET, *self._members(value, path)]
        if isinstance(value, Enum):
            return [_Kind.MEMBER, kind.__qualname__[:MAX_MEMBERS], value.name]
        if isinstance(value, tuple) and hasattr(kind, "__match_args__") and kind is not torch.Size:
            return [_Kind.NAMED_TUPLE, kind.__qualname__[:MAX_MEMBERS], *self._items(value, path)]
        if (leaf := _leaf(value)) is not None:
            return leaf
        raise self._refusal(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _refusal(self, path: Path, what: str) -> CannotTravel:
        return CannotTravel(f"{self._show(path)} is {what}")

    def _tensor(self, tensor: Tensor, path: Path) -> Any:
        kind = type(tensor)
        if kind not in (Tensor, torch.nn.Parameter):
            return self._wrapped(tensor, path)
        if tensor.is_conj() or tensor.is_neg():
            raise self._refusal(path, "a tensor that is conjugated or negated when it is read")
        if tensor.layout is not torch.strided or tensor.dtype not in _CARRIED | _CARRIABLE or tensor.is_meta:
            raise self._refusal(path, f"a tensor of {tensor.dtype} and {tensor.layout} on {tensor.device}")
        order = order_of(tensor)
        if order is None:
            raise self._refusal(path, "a tensor whose elements share their memory, as after expand()")
        place = self._places.get(key := memory_of(tensor))
        if place is None:
            place = self._places[key] = len(self._tensors)
            self._tensors.append(tensor)
            if (other := self._spans.add(tensor, path)) is not None:
                raise self._refusal(path, f"a tensor that shares a part of its memory with {self._show(other)}")
        node: list[Any] = [_Kind.TENSOR, place, _name(tensor.dtype), list(order)]
        return node if kind is Tensor else [_Kind.PARAMETER, tensor.requires_grad, *node[1:]]

    def _wrapped(self, tensor: Any, path: Path) -> list[Any]:
        """A tensor of a class of its own: the tensors and the rest of which it consists, as it tells torch."""
        kind = type(tensor)
        if not is_taken_apart(kind):
            raise self._refusal(path, f"a {kind.__module__}.{kind.__qualname__}")
        names, rest = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        node = [_Kind.WRAPPED, _class_name(kind), self.node(parts, path), self.node(rest, path)]
        return [*node, list(tensor.shape), list(tensor.stride()), _name(tensor.dtype)]

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._met:
            if id(value) in self._open:
                raise self._refusal(path, "a part of itself")
            number = self._met[id(value)]
            self._nodes += self._sizes[number]
            if self._nodes > MAX_NODES:
                raise CannotTravel(f"{self._show(())} has more than {MAX_NODES} values")
            return [_Kind.AGAIN, number]
        number = self._met[id(value)] = len(self._met)
        self._sizes.append(self._nodes)
        self._kept.append(value)
        self._open.add(id(value))
        node = self._contents(value, path)
        self._open.discard(id(value))
        self._sizes[number] = self._nodes - self._sizes[number]
        return node

    def _contents(self, value: Any, path: Path) -> list[Any]:
        match type(value):
            case _ if type(value) is list:
                return [_Kind.LIST, *self._items(value, path)]
            case _ if type(value) is deque:
                return [_Kind.DEQUE, value.maxlen, *self._items(value, path)]
            case _ if type(value) is set:
                return [_Kind.SET, *self._members(value, path)]
            case _ if type(value) is OrderedDict:
                return [_Kind.ORDERED_DICT, *self._entries(value, path, is_sorted=False)]
            case _ if type(value) is Counter:
                return [_Kind.COUNTER, *self._entries(value, path)]
            case _ if type(value) is defaultdict:
                for name, factory in _FACTORIES.items():
                    if value.default_factory is factory:
                        return [_Kind.DEFAULT_DICT, name, *self._entries(value, path)]
                raise self._refusal(path, f"a defaultdict of {value.default_factory!r:.40}")
        return [_Kind.DICT, *self._entries(value, path)]

    def _items(self, values: Sequence[Any], path: Path) -> list[Any]:
        return [self.node(item, (*path, number)) for number, item in enumerate(values)]

    def _members(self, values: Any, path: Path) -> list[Any]:
        return sorted((self._key(item, path) for item in values), key=_pack)

    def _entries(self, values: Mapping[Any, Any], path: Path, *, is_sorted: bool = True) -> list[Any]:
        keys = [(self._key(key, path), key) for key in values]
        if is_sorted:  # before the values, whose order decides over places and numbers
            keys.sort(key=lambda one: _pack(one[0]))
        return [item for node, key in keys for item in (node, self.node(values[key], (*path, key)))]

    def _key(self, key: Any, path: Path) -> Any:
        """A key of a dictionary, or a member of a set: no tensor, but for one that has a place beforehand."""
        if isinstance(key, Tensor):
            if id(key) not in self._given:
                raise self._refusal(path, "a dictionary or a set with a tensor for a key that is no parameter")
            return [_Kind.KEY, self._given[id(key)]]
        if _holds_tensor(key):
            raise self._refusal(path, "a dictionary or a set with a tensor in a key")
        self._odd_keys += is_odd(key)
        if self._odd_keys > MAX_ODD_KEYS:
            raise CannotTravel(
                f"{self._show(())} has more than {MAX_ODD_KEYS} keys that are no texts and small numbers"
            )
        return self.node(key, (*path, key))


_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})


def difference(one: Any, other: Any) -> Path | None:
    """The way to the first value in which two trees differ; None if they are equal in every bit and type."""
    if type(one) is not type(other):
        return ()
    if isinstance(one, Tensor) and is_taken_apart(type(one)):
        return difference(_parts_of(one), _parts_of(other))
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return None if alike and _bits(one) == _bits(other) else ()
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return next(iter((key,) for key in one if key not in other), ())
        pairs: Iterable[tuple[Any, Any, Any]] = ((key, one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple | deque):
        if len(one) != len(other) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return ()
        pairs = ((number, *both) for number, both in enumerate(zip(one, other, strict=True)))
    else:
        return None if encode(one, []) == encode(other, []) else ()
    for key, mine, theirs in pairs:
        if (below := difference(mine, theirs)) is not None:
            return (key, *below)
    return None


def is_taken_apart(kind: type) -> bool:
    """Whether tensors of that class consist of other tensors, which they give to torch, as quantized ones do."""
    return kind is not Tensor and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def kinds_of(made: object) -> list[type]:
    """The classes that the modules of an object's class name: of tensors that are taken apart, of enumerations and of
    named tuples. So a newcomer, whose optimizer has made no state yet, knows them, and no class is looked for by a name
    that somebody has sent."""
    modules = {kind.__module__: sys.modules.get(kind.__module__) for kind in type(made).__mro__}
    named = [value for module in modules.values() if module is not None for value in vars(module).values()]
    found = dict.fromkeys(one for one in named if isinstance(one, type))
    return [
        one
        for one in found
        if issubclass(one, Enum)
        or (issubclass(one, tuple) and hasattr(one, "__match_args__"))
        or (issubclass(one, Tensor) and is_taken_apart(one))
    ]


def copy_of(value: Any) -> Any:
    """A deep copy of a value. Some of the classes of tensors that are taken apart can't be cloned, so these are copied
    part by part."""
    wrapped = [tensor for tensor in tensors_in(value) if is_taken_apart(type(tensor))]
    return copy.deepcopy(value, {id(tensor): _copy_of_parts(tensor) for tensor in wrapped})


def _copy_of_parts(tensor: Any) -> Any:
    parts, rest, *_ = _parts_of(tensor)
    return type(tensor).__tensor_unflatten__(copy_of(parts), rest, tensor.shape, tensor.stride())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: a tensor, or containers of them. What is met again is not looked into."""
    met: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Mapping | list | tuple | set | frozenset | deque) and id(one) not in met:
            met.add(id(one))
            left += [*one.keys(), *one.values()] if isinstance(one, Mapping) else one


def _parts_of(tensor: Any) -> tuple[Any, ...]:
    names, rest = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, rest, tuple(tensor.shape), tensor.dtype


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).untyped_storage())


def is_odd(key: Any) -> bool:
    """Whether many keys with one hash can be found. Those of texts and bytes are salted; of numbers of 64 bits, only a
    few have the same."""
    if type(key) is int:
        return not -(1 << 63) <= key < 1 << 64
    return type(key) not in (str, bytes, float, bool, type(None))


def _holds_tensor(key: Any) -> bool:
    return isinstance(key, Tensor) or (isinstance(key, tuple | frozenset) and any(map(_holds_tensor, key)))


def _plain_node(value: Any, refusal: Callable[[str], CannotTravel]) -> Any:
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        nbytes = value.bit_length() // 8 + 1
        if nbytes > MAX_INT_BYTES:
            raise refusal(f"a whole number of {nbytes} bytes")
        return [_Kind.INT, value.to_bytes(nbytes, "little", signed=True)]
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return [_Kind.TEXT, value.encode("utf-8", "surrogatepass")]
    return value


def _leaf(value: Any) -> list[Any] | None:
    """The array of a value without parts; None if it is no such value."""
    if type(value) is complex:
        return [_Kind.COMPLEX, value.real, value.imag]
    if isinstance(value, torch.dtype):
        return [_Kind.DTYPE, _name(value)]
    if type(value) is torch.Size:
        return [_Kind.SIZE, *value]
    if isinstance(value, torch.device):
        return [_Kind.DEVICE, value.type, value.index]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "tobytes"):
        name = value.dtype.str
        return [_Kind.NUMPY, name, value.tobytes()] if name in _NUMPY else None
    return None


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor, the one with the largest stride first; () if they are in order. None if elements of
    it share their memory."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], dim))
    reached = 1  # elements further on than this have not been met
    for dim in reversed(dims):
        if tensor.shape[dim] > 1:
            if steps[dim] < reached:
                return None
            reached += steps[dim] * (tensor.shape[dim] - 1)
    return () if dims == sorted(dims) else tuple(dims)


def in_order(values: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor with those values whose dimensions lie in memory in that order, see `order_of`."""
    if not order:
        return values
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(*order).contiguous().permute(*back)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors exactly if they are one tensor, or if they have the same memory, shape and dtype."""
    if not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Spans:
    """The memory of tensors that were met, to find those that overlap others."""

    def __init__(self) -> None:
        self._of_storage: dict[tuple[Any, int], list[tuple[int, int, Path]]] = {}

    def add(self, tensor: Tensor, path: Path) -> Path | None:
        """Returns the path of a tensor with which that one overlaps, or None. Of a tensor with gaps nothing is said."""
        count = tensor.numel()
        if not count:
            return None
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if reach != count:
            return None
        begin = tensor.data_ptr()
        end = begin + count * tensor.element_size()
        # The spans of one storage, in order; those of earlier calls do not overlap, or the tree was refused.
        spans = self._of_storage.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
        at = bisect_left(spans, begin, key=lambda span: span[0])
        near = [*spans[max(0, at - 1) : at], *spans[at : at + 1]]
        spans.insert(at, (begin, end, path))
        return next((other for left, right, other in near if begin < right and left < end), None)


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which flat memory holds tensors of that one."""
    return dtype if dtype in _CARRIED else _CARRIERS[dtype.itemsize]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- decoding


def decode(
    encoded: bytes, tensors: Sequence[Tensor], mine: Any = None, kinds: Iterable[type] = (), own: int = 0
) -> Any:
    """Decode a tree that anybody may have sent.

    Args:
        encoded: the bytes.
        tensors: the tensors with their places.
        mine: this peer's own tree. It gives the classes of members of enumerations, and of named tuples.
        kinds: other classes that values may have, see `kinds_of`.
        own: the first so many tensors are this peer's, and stay what they are.

    Raises:
        ValueError: if it is no such tree.
    """
    if len(encoded) > MAX_BYTES:
        raise ValueError(f"a tree of {len(encoded)} bytes, more than {MAX_BYTES}")
    try:
        value = _Decoder(tensors, kinds, own).value(msgspec.msgpack.decode(encoded), mine, 0)
    except (msgspec.MsgspecError, RecursionError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not a tree: {error!r:.200}") from error
    return value


class _Decoder:
    def __init__(self, tensors: Sequence[Tensor], kinds: Iterable[type], own: int) -> None:
        self._tensors, self._own = tensors, own
        self._kinds = {_class_name(kind): kind for kind in kinds if issubclass(kind, Tensor)}
        self._named = {kind.__qualname__[:MAX_MEMBERS]: kind for kind in kinds if not issubclass(kind, Tensor)}
        self._read: dict[tuple[Any, ...], Tensor] = {}
        self._met: list[Any] = []  # the lists, dictionaries, sets and deques; `_OPEN` for those under way
        self._sizes: list[int] = []  # of these: the values in them
        self._odd_keys = 0
        self._nodes = 0

    def value(self, node: Any, mine: Any, depth: int = 0) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise ValueError(f"a tree of more than {MAX_NODES} values, or deeper than {MAX_DEPTH}")
        if type(node) is not list:
            if type(node) not in _PLAIN:
                raise ValueError(f"there is a {type(node).__name__} in the tree")
            return node
        if not node or type(node[0]) is not int or node[0] not in _READERS:
            raise ValueError(f"an array of the tree has no kind: {node[:1]!r:.40}")
        return _READERS[node[0]](self, node[1:], mine, depth + 1)

    # -- values with parts

    def _list(self, node: list[Any], mine: Any, depth: int) -> list[Any]:
        made: list[Any] = []
        with self._meeting(made):
            made.extend(self._items(node, mine, depth))
        return made

    def _tuple(self, node: list[Any], mine: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._items(node, mine, depth))

    def _named_tuple(self, node: list[Any], mine: Any, depth: int) -> Any:
        name, *items = node
        kind: Any = type(mine) if _is_named(mine, tuple, name) else self._named.get(name)
        if kind is None or not issubclass(kind, tuple) or len(kind.__match_args__) != len(items):
            raise ValueError(f"there is a {name!r:.40} of {len(items)} members, and this peer's optimizer has none")
        return kind(*self._items(items, mine, depth))

    def _deque(self, node: list[Any], mine: Any, depth: int) -> deque[Any]:
        longest, *items = node
        if longest is not None and not len(items) <= _natural(longest):
            raise ValueError(f"a deque of at most {longest} has {len(items)}")
        made: deque[Any] = deque(maxlen=longest)
        with self._meeting(made):
            made.extend(self._items(items, mine, depth))
        return made

    def _set(self, node: list[Any], mine: Any, depth: int) -> set[Any]:
        made: set[Any] = set()
        with self._meeting(made):
            made.update(self._members(node, depth))
        return made

    def _frozenset(self, node: list[Any], mine: Any, depth: int) -> frozenset[Any]:
        return frozenset(self._members(node, depth))

    def _dict(self, node: list[Any], mine: Any, depth: int) -> Any:
        return self._fill({}, node, mine, depth)

    def _ordered(self, node: list[Any], mine: Any, depth: int) -> Any:
        return self._fill(OrderedDict(), node, mine, depth, is_sorted=False)

    def _counter(self, node: list[Any], mine: Any, depth: int) -> Any:
        return self._fill(Counter(), node, mine, depth)

    def _default(self, node: list[Any], mine: Any, depth: int) -> Any:
        if not node or type(node[0]) is not str or node[0] not in _FACTORIES:
            raise ValueError("a defaultdict with an unknown factory")
        factory: Any = _FACTORIES[node[0]]
        return self._fill(defaultdict(factory), node[1:], mine, depth)

    def _fill(self, made: Any, node: list[Any], mine: Any, depth: int, *, is_sorted: bool = True) -> Any:
        if len(node) % 2:
            raise ValueError("a dictionary has a key without a value")
        if is_sorted:
            _check_order(node[::2])
        own = mine if isinstance(mine, Mapping) else {}
        with self._meeting(made):
            keys = [self._key(key, depth) for key in node[::2]]
            for key, item in zip(keys, node[1::2], strict=True):
                if key in made:
                    raise ValueError(f"a dictionary has the key {key!r:.40} twice")
                made[key] = self.value(item, own.get(key), depth)
        return made

    @contextmanager
    def _meeting(self, made: Any) -> Iterator[None]:
        number, before = len(self._met), self._nodes
        self._met.append(_OPEN)
        self._sizes.append(0)
        yield
        self._met[number], self._sizes[number] = made, self._nodes - before

    def _items(self, node: list[Any], mine: Any, depth: int) -> list[Any]:
        own = list(mine) if isinstance(mine, list | tuple | deque) else []
        return [self.value(item, own[n] if n < len(own) else None, depth) for n, item in enumerate(node)]

    def _members(self, node: list[Any], depth: int) -> list[Any]:
        _check_order(node)
        members = [self._key(item, depth) for item in node]
        if len(set(members)) != len(members):
            raise ValueError("a set has a member twice")
        return members

    def _key(self, node: Any, depth: int) -> Any:
        if type(node) is list and len(node) == 2 and node[0] == _Kind.KEY and type(node[0]) is int:
            if _natural(node[1]) >= len(self._tensors):
                raise ValueError(f"there is a reference to tensor {node[1]} of {len(self._tensors)}")
            return self._tensors[node[1]]
        key = self.value(node, None, depth)
        if _holds_tensor(key) or not isinstance(key, Hashable):
            raise ValueError(f"a {type(key).__name__} is a key")
        self._odd_keys += is_odd(key)
        if self._odd_keys > MAX_ODD_KEYS:
            raise ValueError(f"more than {MAX_ODD_KEYS} keys are no texts and small numbers")
        hash(key)  # a tuple may hold what has no hash: TypeError
        return key

    def _again(self, node: list[Any], mine: Any, depth: int) -> Any:
        (number,) = node
        if _natural(number) >= len(self._met) or self._met[number] is _OPEN:
            raise ValueError(f"there is a reference to list {number} of {len(self._met)}, or to itself")
        self._nodes += self._sizes[number]
        if self._nodes > MAX_NODES:
            raise ValueError(f"a tree of more than {MAX_NODES} values")
        return self._met[number]

    # -- values without parts

    def _tensor(self, node: list[Any], mine: Any, depth: int) -> Tensor:
        place, name, order = node
        if _natural(place) >= len(self._tensors):
            raise ValueError(f"there is a reference to tensor {place} of {len(self._tensors)}")
        tensor, dtype = self._tensors[place], _dtype(name)
        if place < self._own:
            if dtype != tensor.dtype:
                raise ValueError(f"tensor {place} is this peer's, of {tensor.dtype}, and {name} in the tree")
            return self._once((place,), lambda: tensor)
        if dtype not in _CARRIED | _CARRIABLE or tensor.dtype not in (dtype, carrier(dtype)):
            raise ValueError(f"tensor {place} is {tensor.dtype}, and {name} in the tree")
        tensor = tensor.view(dtype) if tensor.dtype != dtype else tensor
        if type(order) is not list or (order and sorted(map(_natural, order)) != list(range(tensor.dim()))):
            raise ValueError(f"tensor {place} has {tensor.dim()} dimensions, and the order {order!r:.40}")
        return self._once((place, name, *order), lambda: in_order(tensor, order))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """One tensor for all references to it."""
        if key not in self._read:
            self._read[key] = make()
        return self._read[key]

    def _parameter(self, node: list[Any], mine: Any, depth: int) -> Tensor:
        requires_grad, *rest = node
        if type(requires_grad) is not bool:
            raise ValueError("a parameter does not say whether it requires gradients")
        tensor = self._tensor(rest, mine, depth)
        if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"a parameter of {tensor.dtype} requires gradients")
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        return self._once((id(tensor), requires_grad), lambda: torch.nn.Parameter(tensor, requires_grad))

    def _wrapped(self, node: list[Any], mine: Any, depth: int) -> Tensor:
        name, parts, rest, shape, stride, dtype = node
        kind: Any = self._kinds.get(name)
        if kind is None:
            raise ValueError(f"there is a tensor of the class {name!r:.80}, which this peer's optimizer does not have")
        values, rest = self.value(parts, None, depth), self.value(rest, None, depth)
        if type(values) is not dict or not all(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(f"a {name} consists of something other than tensors")
        try:
            outer = torch.Size(map(_natural, shape)), tuple(map(_natural, stride))
            made = kind.__tensor_unflatten__(values, rest, *outer)
            names, again = made.__tensor_flatten__()
            parts_again = {name: getattr(made, name) for name in names}
        except Exception as error:  # whatever a class raises about what anybody may have sent
            raise ValueError(f"a {name} can't be made of what it should consist of: {error}") from error
        described = list(made.shape), list(made.stride()), _name(made.dtype)
        if type(made) is not kind or described != (shape, stride, dtype):
            raise ValueError(f"a {name} of {dtype} and of shape {shape!r:.60} has become another one")
        if again != rest or difference(parts_again, values) is not None:
            raise ValueError(f"a {name} does not consist of what it was made of")
        wrapped: Tensor = made
        return wrapped

    def _int(self, node: list[Any], mine: Any, depth: int) -> int:
        (data,) = node
        value = int.from_bytes(_bytes(data, MAX_INT_BYTES), "little", signed=True)
        if -(1 << 63) <= value < 1 << 64 or len(data) != value.bit_length() // 8 + 1:
            raise ValueError("a whole number in more bytes than it needs")
        return value

    def _complex(self, node: list[Any], mine: Any, depth: int) -> complex:
        real, imaginary = node
        if type(real) is not float or type(imaginary) is not float:
            raise ValueError("a complex number whose parts are no floats")
        return complex(real, imaginary)

    def _text(self, node: list[Any], mine: Any, depth: int) -> str:
        (data,) = node
        return _bytes(data, MAX_BYTES).decode("utf-8", "surrogatepass")

    def _dtype_of(self, node: list[Any], mine: Any, depth: int) -> torch.dtype:
        (name,) = node
        return _dtype(name)

    def _size(self, node: list[Any], mine: Any, depth: int) -> torch.Size:
        if len(node) > MAX_MEMBERS:
            raise ValueError(f"a torch.Size of {len(node)} dimensions")
        return torch.Size([_natural(dim) for dim in node])

    def _device(self, node: list[Any], mine: Any, depth: int) -> torch.device:
        kind, index = node
        if kind not in _DEVICES or not (index is None or 0 <= _natural(index) < 128):
            raise ValueError(f"there is no device {kind!r:.40}")
        return torch.device(kind) if index is None else torch.device(kind, index)

    def _numpy(self, node: list[Any], mine: Any, depth: int) -> Any:
        import numpy as np  # torch does without it, so do we until a state has such a number

        name, data = node
        if name not in _NUMPY:
            raise ValueError(f"there is a number of numpy of {name!r:.40}")
        dtype = np.dtype(name)
        if len(_bytes(data, dtype.itemsize)) != dtype.itemsize:
            raise ValueError(f"a number of numpy of {name} has {len(data)} bytes")
        return np.frombuffer(data, dtype)[0]

    def _member(self, node: list[Any], mine: Any, depth: int) -> Any:
        name, member = node
        kind = type(mine) if _is_named(mine, Enum, name) else self._named.get(name)
        if kind is None or not issubclass(kind, Enum) or member not in kind.__members__:
            raise ValueError(f"there is a {name!r:.40}.{member!r:.40}, and this peer's optimizer has no such class")
        return kind[member]

    def _object(self, node: list[Any], mine: Any, depth: int) -> Any:
        name, contents = node
        pair = next((pair for pair in _pairs.values() if pair.name == name), None)
        if pair is None:
            raise ValueError(f"there is a {name!r:.40}, and this peer has no pair of functions for it: see travels()")
        value = self.value(contents, None, depth)
        try:
            return pair.back(value)
        except Exception as error:  # the user's function, and a value that anybody may have sent
            raise ValueError(f"a {name} can't be made of what was sent: {error!r:.200}") from error


_READERS: Final[dict[int, Callable[[_Decoder, list[Any], Any, int], Any]]] = {
    _Kind.LIST: _Decoder._list,
    _Kind.TUPLE: _Decoder._tuple,
    _Kind.DICT: _Decoder._dict,
    _Kind.ORDERED_DICT: _Decoder._ordered,
    _Kind.DEFAULT_DICT: _Decoder._default,
    _Kind.COUNTER: _Decoder._counter,
    _Kind.SET: _Decoder._set,
    _Kind.FROZENSET: _Decoder._frozenset,
    _Kind.DEQUE: _Decoder._deque,
    _Kind.AGAIN: _Decoder._again,
    _Kind.TENSOR: _Decoder._tensor,
    _Kind.PARAMETER: _Decoder._parameter,
    _Kind.INT: _Decoder._int,
    _Kind.COMPLEX: _Decoder._complex,
    _Kind.TEXT: _Decoder._text,
    _Kind.DTYPE: _Decoder._dtype_of,
    _Kind.SIZE: _Decoder._size,
    _Kind.DEVICE: _Decoder._device,
    _Kind.NUMPY: _Decoder._numpy,
    _Kind.MEMBER: _Decoder._member,
    _Kind.NAMED_TUPLE: _Decoder._named_tuple,
    _Kind.OBJECT: _Decoder._object,
    _Kind.WRAPPED: _Decoder._wrapped,
}


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is no number of something")
    return value


def _bytes(value: Any, most: int) -> bytes:
    if type(value) is not bytes or len(value) > most:
        raise ValueError(f"there are no bytes, or more than {most}, where they must be")
    return value


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r:.40}")
    return _DTYPES[name]


def _is_named(mine: Any, base: type, name: Any) -> bool:
    return isinstance(mine, base) and type(mine).__qualname__[:MAX_MEMBERS] == name


def _check_order(nodes: Iterable[Any]) -> None:
    """Raises ValueError if keys of a dictionary, or members of a set, are not in the order of their encodings."""
    packed = [_pack(node) for node in nodes]
    if packed != sorted(packed):
        raise ValueError("the keys of a dictionary, or the members of a set, are not in order")


_pack = msgspec.msgpack.encode
