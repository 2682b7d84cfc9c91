"""The messages between the ranks of a cluster. In every call each rank sends one report, then rank 0 may send tasks,
and finally rank 0 sends one verdict.

A *call* is a method of the optimizer that all ranks call at the same time, such as a step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message of a rank to rank 0. `token` is a secret that rank 0 has given only to its ranks."""

    rank: Rank
    token: Annotated[bytes, msgspec.Meta(max_length=32)]


class Report(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A rank has reached a call.

    Attributes:
        call: the name of the call.
        samples: the number of samples that the rank brings to a step.
        gradients: which of its sharded parameters have a gradient, as the bits of a number.
        digest: the digest of the other gradients if rank 0 compares them, else b"".
        error: why the call fails at that rank; "" if it does not.
        loss: the loss of these samples: its value, and the number of its kind; None if there is none.
    """

    call: Text
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    gradients: bytes = b""
    digest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    error: Text = ""
    loss: tuple[float, int] | None = None


class Go(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """All ranks have reached the call: now all run its collectives."""


class Do(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """A task for all ranks: rank 0 asks them, within a call, to do something with their shares of the state.

    Attributes:
        what: the name of the task.
        given: its arguments, as msgpack.
        is_quiet: whether there is no answer. Then errors are in the next report.
    """

    what: Text
    given: bytes
    is_quiet: bool = False


class Done(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The answer to `Do`.

    Attributes:
        answer: the result, as msgpack.
        error: the error that the task has raised; "" if none.
    """

    answer: bytes
    error: Text = ""


class Verdict(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The result of a call at rank 0, which ends the call.

    Attributes:
        epoch: the epoch of the parameters that all ranks have after the call.
        changed: whether rank 0 sends the parameters now.
        options: for each parameter group, the numbers that a scheduler or a vote may have changed.
        error: the error that rank 0 has raised; "" if none.
        value: what the call returns at all ranks.
    """

    epoch: int
    changed: bool
    options: list[dict[Text, float]] = []
    error: Text = ""
    value: bool = False


class Lost(msgspec.Struct, tag=3, array_like=True, frozen=True):
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


class Brought(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """What a rank brings to a question. See `shoal.cluster.team`.

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
        number, call: as in `Brought`.
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


Message = Hello | Report | Verdict | Lost | Bye | Go | Do | Done | Brought | Answered | Awaited | WaitOver
