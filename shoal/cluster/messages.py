"""What the ranks of a cluster tell each other: in every step one report of each rank, then what rank 0 has all do, and
one verdict of rank 0."""

from __future__ import annotations

from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message of a rank to rank 0. `token`: that rank 0 has given to its ranks alone."""

    rank: Rank
    token: Annotated[bytes, msgspec.Meta(max_length=32)]


class Report(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A rank has come to a call.

    Attributes:
        call: its name.
        samples: what it brings to a step.
        gradients: which of its sharded parameters have one, as the bits of a number.
        digest: of the other gradients, where rank 0 compares them, else b"".
        error: why the call makes no sense at that rank; "" if it does.
    """

    call: Text
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    gradients: bytes = b""
    digest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    error: Text = ""


class Go(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """All ranks are there: now all make the collectives of the call."""


class Do(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Rank 0 has all ranks do something with their shares of the state, in a call of all.

    Attributes:
        what: its name.
        given: what belongs to it, in msgpack.
        is_quiet: nobody waits for an answer, and none is given; what goes wrong is in the next report.
    """

    what: Text
    given: bytes
    is_quiet: bool = False


class Done(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """A rank has done it.

    Attributes:
        answer: in msgpack.
        error: what it has raised; "" if nothing.
    """

    answer: bytes
    error: Text = ""


class Verdict(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """What rank 0 has done in a call.

    Attributes:
        epoch: of the parameters that all have after it.
        changed: whether it sends the parameters now.
        options: of each parameter group, the numbers that a scheduler or a vote may have changed.
        error: what rank 0 has raised; "" if nothing.
        value: what the call returns at all ranks.
    """

    epoch: int
    changed: bool
    options: list[dict[Text, float]] = []
    error: Text = ""
    value: bool = False


class Lost(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Rank 0 has lost that rank."""

    rank: Rank
    reason: Text


class Bye(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The sender has shut its optimizer down. `error`: what had been raised there; "" if nothing."""

    error: Text = ""


Message = Hello | Report | Verdict | Lost | Bye | Go | Do | Done
