"""A peer's contribution to a round, the interface to the bytes of the round, its outcome, and the gathered data."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.swarm.protocol.book import Book
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.messages import MAX_GATHER_BYTES, Begin, Commit, Part, Repair, Result, Source
from shoal.swarm.protocol.tip import Tip

Fault = Callable[[bytes, str], None]
Buffers = Sequence[memoryview]

log = logging.getLogger(__name__)


class SendTo(Protocol):
    """Sends a chunk to members."""

    def __call__(
        self, keys: Sequence[bytes], message: Part | Result, buffers: Buffers = (), name: bytes = b""
    ) -> None: ...


class BytesExchange(Protocol):
    """One member's side of the all-reduce of one round. This interface hides tensors from the protocol;
    `shoal.averaging.exchange.Exchange` implements it for flat tensors.

    Attributes:
        book: who owes which chunk to whom.
        progressed: a counter that grows with everything that arrives.
        encoded: None, or the results by chunk as their reducers have encoded them, as far as they came so, for the redo
            log. The owner of the exchange sets it to an empty dictionary before the round.
    """

    book: Book
    progressed: int
    encoded: dict[int, bytes] | None

    def start(self, weight: float, leases: Leases) -> None:
        """Send the first parts. `weight` is the weight of this member's input. Until `close`, memory of the output is
        registered in `leases` for chunks that are to arrive."""

    def part(self, sender: bytes, part: Part, buffers: Buffers) -> None:
        """A member's part of a chunk has arrived. Raises RuleBroken if it breaks the rules of the round."""

    def result(self, sender: bytes, result: Result, buffers: Buffers) -> None:
        """The average of a chunk has arrived. Raises RuleBroken if it breaks the rules of the round."""

    def put_out(self, keys: Sequence[bytes]) -> None:
        """Continue without these members."""

    def repair(self, repair: Repair) -> list[Source]:
        """Follow a repair. Returns the chunks to fetch. Raises RuleBroken if it does not fit the round."""

    def await_fetched(self, chunk: int, holder: bytes, leases: Leases) -> None:
        """Register the output memory of a chunk in `leases`: this peer is about to ask that holder for the chunk."""

    def fetched(self, chunk: int, digest: bytes, data: memoryview) -> None:
        """A chunk that this peer has asked a holder for has arrived, uncompressed or as its reducer has encoded it.
        Raises RuleBroken if it does not have that digest."""

    def close(self) -> None:
        """Stop: chunks that still arrive are not written to the output."""

    def chunk_bytes(self, chunk: int) -> memoryview:
        """The average of a chunk that this member holds, uncompressed."""


@dataclass(slots=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        weight: the weight of its input in the mean, at least 0 (with 0 it only receives); it may change until `prepare`
            has ended.
        open: makes the exchange of a round: `open(begin, send, fault)`.
        patience: the number of seconds to wait for others to join.
        prepare: if given, awaited between BEGIN and the first byte; it may wait until the input can be read.
        excused: returns whether `prepare` waits for the user's permission. If so, this peer asks the others not to
            treat its silence as a fault.
        gathered: bytes that all members of the round receive; at most 64 KiB.
        tip: the tip of the state that the input was computed from; a round of another tip raises `Behind`. None: any
            tip.
        machine: a text that is equal on machines where a local step gives the same bits.
        state: the digest of the local state, or b"".
        options: the options with which this peer would make the optimizer step that follows, encoded, or b"".
        loss: the mean loss of this peer's samples, or None.
        average: the name of the average that this peer has from rounds before this one, or b"". A local step gives the
            same bits where this is equal, too.
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
    loss: Loss | None = None
    average: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A committed round.

    Attributes:
        begin: the BEGIN of the round.
        commit: its COMMIT.
        gathered: the data that each member gave for all, by key.
        missed: whether this peer was not in the round, and fetched the result afterwards.
        join_to_begin_seconds: the time from the last JOIN to BEGIN; None if this peer did not coordinate.
        matchmaking_seconds: the time from the call of `average` to BEGIN.
        allreduce_seconds: the time from BEGIN to COMMIT.
        bytes_sent, bytes_received: payload bytes of this peer in the round.
        began: when the round began here, or this peer asked for its result.
    """

    begin: Begin
    commit: Commit
    gathered: dict[bytes, bytes]
    missed: bool
    join_to_begin_seconds: float | None
    matchmaking_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    began: float = 0.0


def encode_gathered(value: Any) -> bytes:
    """Encode `value` as msgpack. Raises ValueError if it is not plain data, or takes more than 64 KiB."""
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"gather must be plain data that msgpack can write: {error}") from error
    _check_size(data)
    return data


def decode_gathered(data: bytes) -> Any:
    """Decode `data` from another peer; None for b"". Raises ValueError if it is not plain data, or takes more than
    64 KiB."""
    _check_size(data)
    try:
        return msgspec.msgpack.decode(data) if data else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what it gathers is not plain data in msgpack: {error}") from error


def _check_size(data: bytes) -> None:
    if len(data) > MAX_GATHER_BYTES:
        raise ValueError(f"gather takes {len(data)} bytes; at most {MAX_GATHER_BYTES} are allowed")


def told(outcome: Outcome) -> dict[PeerID, Any]:
    """The data that the members of a round gave for all, by peer id. If a member's data can't be read, its value is
    None, and the round does not fail."""
    values: dict[PeerID, Any] = {}
    for member in outcome.begin.members:
        try:
            values[member.peer] = decode_gathered(outcome.gathered.get(member.key, b""))
        except ValueError as error:
            log.warning("%r: %s", member.peer, error)
            values[member.peer] = None
    return values
