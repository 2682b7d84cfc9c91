"""What a peer brings to a round, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.p2p.identity import PeerID
from shoal.swarm.bytes_exchange import BytesExchange
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Begin, Commit, Part, Result
from shoal.swarm.protocol.tip import Tip

Fault = Callable[[bytes, str], None]


class SendTo(Protocol):
    """`Channel.notify`, for chunks."""

    def __call__(
        self, keys: Sequence[bytes], message: Part | Result, buffers: Sequence[memoryview] = (), name: bytes = b""
    ) -> None: ...


@dataclass(slots=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        weight: of its input in the mean, at least 0 (then it only receives); may be changed until `prepare` has ended.
        open: makes the exchange of a round: `open(begin, send, fault)`.
        patience: how many seconds to wait for others.
        prepare: awaited between BEGIN and the first byte, if given: may wait for the input to be free.
        excused: whether `prepare` waits for what the user will allow: then the others are asked not to take that for a
            fault.
        gathered: bytes that all members of the round get; at most 64 KiB.
        tip: the state that the input was made from: a round of any other tip raises `Behind`. None: of any tip.
        machine: names all on which the bits of a local step depend.
        state: digest of the local state, or b"".
        options: with which this peer would make the step that follows, or b"".
    """

    weight: float
    open: Callable[[Begin, SendTo, Fault], BytesExchange]
    patience: float = 15.0
    prepare: Callable[[], Awaitable[None]] | None = None
    gathered: bytes = b""
    excused: Callable[[], bool] = lambda: False
    tip: Tip | None = None
    machine: str = ""
    state: bytes = b""
    options: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round that was committed.

    Attributes:
        begin: its BEGIN.
        commit: its COMMIT.
        gathered: what the members brought, by key.
        missed: whether this peer was not in it and fetched the result afterwards.
        matchmaking_seconds: from the call of `average` to BEGIN.
        allreduce_seconds: from BEGIN to COMMIT.
        join_to_begin_seconds: from the last JOIN to BEGIN; None on members that did not coordinate.
        bytes_sent, bytes_received: payload bytes of this peer in the round.
    """

    begin: Begin
    commit: Commit
    gathered: dict[bytes, bytes]
    missed: bool
    matchmaking_seconds: float
    allreduce_seconds: float
    join_to_begin_seconds: float | None
    bytes_sent: int
    bytes_received: int

    @property
    def coordinator(self) -> PeerID:
        return PeerID(self.begin.ballot.coordinator)


@dataclass
class Attempt:
    """A call of `Swarm.average` that is under way."""

    contribution: Contribution
    started: float
    sent: int  # the node's counters when the round began
    received: int
    joined: tuple[bytes, Tip] | None = None  # where, and for which tip
    introduced: tuple[bytes, bytes] | None = None  # to whom all members that are known were told, and their fingerprint
    began: float = 0.0
    join_to_begin: float | None = None
    exchange: BytesExchange | None = None
    gathered: dict[bytes, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    error: AveragingError | None = None
    patience: asyncio.Timeout | None = None  # ends the call when the round has stood still for so long
    timeout: float = 0.0  # that patience, in seconds
    asked_to_wait: float = float("-inf")  # when a member last said that its user has not allowed the round yet
