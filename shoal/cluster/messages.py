"""The messages between the ranks of a cluster. `shoal.cluster.team` says how they follow each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RankHello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message of a rank to rank 0. `token` is a secret that rank 0 has given only to its ranks."""

    rank: Rank
    token: Annotated[bytes, msgspec.Meta(max_length=32)]


class LostRank(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Rank 0 has lost the rank `rank`."""

    rank: Rank
    reason: Text


class Bye(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The sender has shut its optimizer down.

    Attributes:
        error: the error that has ended its training; "" if none.
        in_call: whether it was in a call of all ranks. If so, or if there is an error, the others take it for lost.
    """

    error: Text = ""
    in_call: bool = False


class HandedIn(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """What a rank hands in to a question. See `shoal.cluster.team`.

    Attributes:
        number: the number of the call.
        call: the name of the call.
        question: the name of the question; "" if an error has ended the call at that rank.
        value: the value, as msgpack.
        error: that error; "" if none.
    """

    number: Number
    call: Text
    question: Text
    value: bytes = b""
    error: Text = ""


class Answered(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """The answer of rank 0 to a question, or the end of a call.

    Attributes:
        number, call: as in `HandedIn`.
        question: the name of the question; "" if the call ends.
        value: the answer, as msgpack.
        error: the error that has ended the call; "" if none.
    """

    number: Number
    call: Text
    question: Text = ""
    value: bytes = b""
    error: Text = ""


class Awaited(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Rank 0 has waited for some time for what this rank brings to a question."""

    number: Number
    call: Text
    question: Text


class WaitOver(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Rank 0 ends a wait of all ranks: the `wait`-th of the call."""

    number: Number
    wait: Number


Message = RankHello | LostRank | Bye | HandedIn | Answered | Awaited | WaitOver
