"""Descriptions of the tensors of a run, by which two peers find the tensor that differs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shoal.p2p.transport import Buffer

MAX_TENSORS = 1 << 17  # of one kind
MAX_TEXT = 1024  # characters of a dtype and shape
MAX_BYTES = 4 << 20  # of all: one buffer

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Shapes = Annotated[list[Text], msgspec.Meta(max_length=MAX_TENSORS)]
Wire = Annotated[list[tuple[Text, Shapes]], msgspec.Meta(max_length=16)]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of one kind, in order.

    Attributes:
        kind: what they are, in the plural, such as "parameters".
        shapes: dtype and shape of each, such as "float32[20, 10]".
        names: this peer's names of them. A tensor without a name has "", or is beyond the end of the sequence.
    """

    kind: str
    shapes: Sequence[str]
    names: Sequence[str] = ()


def encode_tensors(described: Sequence[Tensors]) -> bytes:
    """Encode descriptions for another peer, without the names. Returns b"" if they take more than 4 MiB."""
    encoded = msgspec.msgpack.encode([(one.kind, list(one.shapes)) for one in described])
    return encoded if len(encoded) <= MAX_BYTES else b""


def difference(mine: Sequence[Tensors], theirs: Buffer) -> str | None:
    """The difference between this peer's tensors and the description that another peer has sent, in words for this
    peer; None if there is none. Raises ValueError if `theirs` is not a description."""
    try:
        received = dict(_decoder.decode(theirs))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a description of tensors: {error}") from error
    for one in mine:
        here, there = one.shapes, received.get(one.kind, [])
        found = []
        if len(here) != len(there):
            found.append(f"the number of {one.kind} is {len(here)} here, and {len(there)} there")
        first = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
        if first is not None:
            name = f" ({one.names[first]})" if first < len(one.names) and one.names[first] else ""
            found.append(f"{one.kind}[{first}]{name} is {here[first]} here, and {ascii(there[first])[1:-1]} there")
        if found:
            return "; ".join(found)
    return None


_decoder = msgspec.msgpack.Decoder(Wire)
