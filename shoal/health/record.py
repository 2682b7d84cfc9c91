"""The `Health` record: what a peer says of itself every few seconds. Data and bounds; no I/O."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import msgspec

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import Role

PERIOD_SECONDS = 10.0  # between two records of a peer
LIFE_SECONDS = 30.0  # of a record in the DHT
MAX_BYTES = 1536  # of an encoded record, without membership and signature; a usual one takes 400 to 600
MAX_TEXT, MAX_REASON = 64, 160  # characters
MAX_UNREACHED = MAX_LOST = 4  # members that one record names
PREFIX_BYTES = 8  # of hashes and keys: enough to tell apart what nobody has forged
MARK_EVERY = (1, 4, 16, 64, 256, 1024)  # see `Health.marks`

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1 << 53)]  # since 1970, of the peer's own clock
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
# What may be written to a terminal: no control characters, and none that change the direction or the width of others.
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff"
PRINTABLE = rf"^[^{UNPRINTABLE}]*\Z"
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=PRINTABLE)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON, pattern=PRINTABLE)]
Prefix = Annotated[bytes, msgspec.Meta(min_length=PREFIX_BYTES, max_length=PREFIX_BYTES)]


class FaultKind(Enum):
    """What can go wrong for a peer, and is counted."""

    ROUND = "round"  # a round failed, and is tried again
    ALONE = "alone"  # this peer has gone on with its own gradients
    TOO_FEW = "too few"  # min_peers are not there, or nobody to go on with
    DOWNLOAD = "download"  # the others' state could not be downloaded
    UNLIKE = "unlike"  # this peer's state or gradients differed from those of like peers
    NOT_FINITE = "not finite"  # gradients or a loss with NaN or infinity
    FORK = "fork"  # the run has forked


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """The last thing that went wrong, and when."""

    kind: FaultKind
    reason: Reason
    at: Time


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """The state of one epoch: the beginnings of its lineage and of the digest of its parameters. A digest of zeros is
    not to be compared: peers that are well may differ in it."""

    epoch: Count
    lineage: Prefix
    digest: Prefix


class Round(msgspec.Struct, array_like=True, frozen=True):
    """The last epoch that this peer ended together with others: where its time went, in seconds.

    Attributes:
        epoch: that began after it.
        samples: of all peers.
        members: of the round.
        waiting: for the others' samples.
        matchmaking: until the round began.
        exchange: until all bytes had passed: the all-reduce.
        step: of the optimizer.
        sent, received: bytes, in the round.
    """

    epoch: Count
    samples: Amount
    members: Count
    waiting: Seconds
    matchmaking: Seconds
    exchange: Seconds
    step: Seconds
    sent: Count
    received: Count


class Totals(msgspec.Struct, array_like=True, frozen=True):
    """Since the peer started; the seconds as in `Round`.

    Attributes:
        rounds: that it was in.
        steps, samples: that it made.
        sent, received: bytes of tensors, states included.
        downloads: of the others' state.
    """

    rounds: Count = 0
    steps: Count = 0
    samples: Amount = 0.0
    waiting: Seconds = 0.0
    matchmaking: Seconds = 0.0
    exchange: Seconds = 0.0
    step: Seconds = 0.0
    sent: Count = 0
    received: Count = 0
    downloads: Count = 0


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """Another peer of the run that goes by other terms, and how they differ."""

    key: Prefix
    difference: Reason


class Lost(msgspec.Struct, array_like=True, frozen=True):
    """A member whose connection to this peer ended less than LIFE_SECONDS ago, and that did not say that it leaves.

    Attributes:
        key: of it.
        number: how many members this peer had lost before, since it started: tells two losses of one member apart.
        coordinated: whether it coordinated this peer's round, or was to call the next one.
    """

    key: Prefix
    number: Count
    coordinated: bool


class PutOut(msgspec.Struct, array_like=True, frozen=True):
    """A member that this peer, as the coordinator, has put out of a round, and why; `number` as in `Lost`."""

    key: Prefix
    number: Count
    reason: Reason


class Health(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """One peer, now.

    Attributes:
        started: when the peer started, by its own clock.
        number: how many records it had written before since then; of two, the one with the larger (started, number) is
            newer.
        at: when it was made.
        left: whether the peer leaves the run: its last record.
        version, torch, device: the releases of Shoal and torch, and what it computes on.
        role: in rounds.
        terms: hash of what must be equal in the run.
        machine: hash of all on which the bits of a step depend: peers of one machine hold equal parameters.
        epoch, samples_behind: of the model's parameters.
        newest: the newest epoch that this peer has heard of.
        marks: the last states at epochs that 1, 4, 16, 64, 256 and 1024 divide, as far as this peer has made or
            downloaded them. Records of two peers are made at different times; these are what both will have.
        loss: the mean of those that were reported since the record before, or the one before that; None if there was
            none.
        samples: accumulated in this epoch, by this peer.
        all_samples, target: by all peers, as last told by the coordinator; where the epoch ends.
        counts_steps: whether those three, and `samples_per_second`, are inner steps in place of samples.
        samples_per_second, step_seconds: a moving average; of the last steps.
        epoch_seconds: the mean of the last epochs; 0 before the second.
        last: the last round; None before the first.
        totals, faults, fault: since it started.
        members: that it is connected to, itself included.
        unreached: the known members that it can't reach.
        refused: a peer of the run with other terms; None if there is none now.
        cpu_seconds, memory: of the process; bytes.
        lost: the members that were lost last. A record that names another one is published at once.
        put_out: the last member that was put out of a round; None before the first.
    """

    started: Time
    number: Count
    at: Time
    left: bool
    version: Text
    torch: Text
    device: Text
    role: Role
    terms: Prefix
    machine: Prefix
    epoch: Count
    samples_behind: Amount
    newest: Count
    marks: Annotated[tuple[Mark, ...], msgspec.Meta(max_length=len(MARK_EVERY))]
    loss: Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)] | None
    samples: Amount
    all_samples: Amount
    target: Amount
    samples_per_second: Amount
    step_seconds: Seconds
    epoch_seconds: Seconds
    last: Round | None
    totals: Totals
    faults: Annotated[dict[FaultKind, Count], msgspec.Meta(max_length=len(FaultKind))]
    fault: Fault | None
    members: Count
    unreached: Annotated[tuple[Prefix, ...], msgspec.Meta(max_length=MAX_UNREACHED)]
    refused: Refused | None
    cpu_seconds: Amount
    memory: Count
    lost: Annotated[tuple[Lost, ...], msgspec.Meta(max_length=MAX_LOST)] = ()
    put_out: PutOut | None = None
    counts_steps: bool = False

    @property
    def order(self) -> tuple[float, int]:
        """Of two records of a peer, the newer one's is larger."""
        return self.started, self.number


def printable(text: str, limit: int) -> str:
    """As much of a text as a record takes: `limit` bytes, of characters that may be written to a terminal."""
    return _unprintable.sub(" ", text).encode(errors="replace")[:limit].decode(errors="ignore")


def name_of(peer: PeerID) -> str:
    """A peer as tables and labels name it: the last 8 characters of its id."""
    return str(peer)[-8:]


def encode_health(health: Health) -> msgspec.Raw:
    """The bytes of a record."""
    return msgspec.Raw(msgspec.msgpack.encode(health))


def decode_health(record: bytes) -> Health:
    """The record that somebody has written so. Raises ValueError if it breaks a bound."""
    if len(record) > MAX_BYTES:
        raise ValueError(f"a health record of {len(record)} bytes: at most {MAX_BYTES} count")
    try:
        return _decoder.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a health record: {error}") from error


_unprintable = re.compile(f"[{UNPRINTABLE}]")
_decoder = msgspec.msgpack.Decoder(Health)
