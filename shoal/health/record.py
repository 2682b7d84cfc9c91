"""The `Health` record, which a peer publishes about itself every few seconds. Data and bounds; no I/O."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import msgspec

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import Role

PERIOD_SECONDS = 10.0  # between two records of a peer
LIFE_SECONDS = 30.0  # lifetime of a record in the DHT
MAX_BYTES = 1536  # size of an encoded record without membership and signature; a usual one takes 400 to 600
MAX_TEXT, MAX_REASON = 64, 160  # characters
MAX_UNREACHED = MAX_LOST = 4  # members that one record names
PREFIX_BYTES = 8  # of hashes and keys; enough to tell them apart, but not against forgery
MARK_EVERY = (1, 4, 16, 64, 256, 1024)  # see `Health.marks`

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=1 << 53)]  # since 1970, of the peer's own clock
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
# Characters that must not be written to a terminal: control characters, and those that change the direction or the
# width of others.
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff"
PRINTABLE = rf"^[^{UNPRINTABLE}]*\Z"
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=PRINTABLE)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON, pattern=PRINTABLE)]
Prefix = Annotated[bytes, msgspec.Meta(min_length=PREFIX_BYTES, max_length=PREFIX_BYTES)]


class FaultKind(Enum):
    """The kinds of faults that a peer counts."""

    ROUND = "round"  # a round failed, and was repeated
    ALONE = "alone"  # this peer has continued with its own gradients only
    TOO_FEW = "too few"  # fewer than min_peers are there, or no other peer
    DOWNLOAD = "download"  # the others' state could not be downloaded
    UNLIKE = "unlike"  # this peer's state or gradients differed from those of peers with the same machine
    NOT_FINITE = "not finite"  # gradients or a loss had NaN or infinity
    FORK = "fork"  # the run has forked
    STATE = "state"  # the optimizer keeps something that newcomers can't be sent


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """The last fault, and when it happened."""

    kind: FaultKind
    reason: Reason
    at: Time


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """The state of one epoch: the beginnings of its lineage and of the digest of its parameters. A digest of zeros must
    not be compared, because healthy peers may differ in that epoch."""

    epoch: Count
    lineage: Prefix
    digest: Prefix


class Round(msgspec.Struct, array_like=True, frozen=True):
    """How the last epoch that this peer ended together with others spent its time. Times are in seconds.

    Attributes:
        epoch: the number of the epoch that began after it.
        samples: the number of samples of all peers.
        members: the number of members of the round.
        waiting: the time until the others had their samples.
        matchmaking: the time until the round began.
        exchange: the time of the all-reduce.
        step: the time of the optimizer's step.
        sent, received: bytes that this peer sent and received in the round.
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
    """Totals since the peer started. The times are sums of those in `Round`.

    Attributes:
        rounds: the number of rounds that it was in.
        steps, samples: how many it has made.
        sent, received: bytes of tensors, states included.
        downloads: how often it has downloaded the others' state.
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


class OtherTerms(msgspec.Struct, array_like=True, frozen=True):
    """Another peer of the run that has other terms, and how they differ."""

    key: Prefix
    difference: Reason


class Lost(msgspec.Struct, array_like=True, frozen=True):
    """A member whose connection to this peer ended less than LIFE_SECONDS ago although it had not said that it leaves.

    Attributes:
        key: the beginning of its key.
        number: how many members this peer had lost before, since it started. So two losses of one member differ.
        coordinated: whether the member coordinated this peer's round, or was to call the next one.
    """

    key: Prefix
    number: Count
    coordinated: bool


class PutOut(msgspec.Struct, array_like=True, frozen=True):
    """A member that this peer, as the coordinator, has put out of a round, and the reason; `number` as in `Lost`."""

    key: Prefix
    number: Count
    reason: Reason


class Joining(msgspec.Struct, array_like=True, frozen=True):
    """How far this peer, which loads the run's state, has come.

    Attributes:
        has: how many bytes have arrived.
        of: how many bytes the state has; 0 while the peer asks who has it.
        seconds: how long it still takes; 0 if that is not known.
    """

    has: Count = 0
    of: Count = 0
    seconds: Seconds = 0.0


class Health(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The state of one peer at one moment.

    Attributes:
        started: when the peer started, by its own clock.
        number: how many records it had published before, since it started. Of two records, the one with the larger
            (started, number) is newer.
        at: when the record was made.
        left: whether the peer leaves the run; this is its last record then.
        version, torch: the releases of Shoal and torch.
        device: the device on which it computes.
        role: its role in rounds.
        terms: a hash of the options that must be equal in the run.
        machine: a hash of everything on which the bits of a step depend. Peers with the same hash hold equal
            parameters.
        epoch, samples_behind: the epoch of the model's parameters, and the samples of all epochs before.
        newest: the newest epoch that this peer has heard of.
        marks: the last states at epochs that are multiples of 1, 4, 16, 64, 256 and 1024, as far as this peer has made
            or downloaded them. Records of two peers are made at different times, but they have some of these in common.
        loss: the mean of the losses that were reported since the last record or the one before it; None if none was.
        samples: the samples that this peer has accumulated in this epoch.
        all_samples: the samples of all peers, as the coordinator last told them.
        target: the number of samples at which the epoch ends.
        counts_steps: whether these three, and `samples_per_second`, count inner steps in place of samples.
        samples_per_second: a moving average.
        step_seconds: the time of a training step, from the last steps.
        epoch_seconds: the mean time of the last epochs; 0 before the second.
        last: the last round; None before the first.
        totals, faults: totals and numbers of faults since it started.
        fault: the last fault; None if there was none.
        members: the number of members that it is connected to, itself included.
        unreached: the known members that it can't reach.
        refused: a peer of the run with other terms; None if there is none now.
        cpu_seconds: the CPU time of the process.
        memory: the resident memory of the process, in bytes.
        lost: the members that were lost last. When a member is lost, a record is published at once.
        put_out: the last member that it has put out of a round; None before the first.
        joining: how far it has loaded the run's state; None if it loads none. When it begins and when it ends, a record
            is published at once.
        waits: for how many more seconds its round waits for newcomers that load the state; 0 if it does not.
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
    refused: OtherTerms | None
    cpu_seconds: Amount
    memory: Count
    lost: Annotated[tuple[Lost, ...], msgspec.Meta(max_length=MAX_LOST)] = ()
    put_out: PutOut | None = None
    counts_steps: bool = False
    joining: Joining | None = None
    waits: Seconds = 0.0

    @property
    def order(self) -> tuple[float, int]:
        """A sort key: larger for the newer of two records of a peer."""
        return self.started, self.number


def printable(text: str, limit: int) -> str:
    """Shorten a text to `limit` bytes, and replace characters that must not be written to a terminal by spaces."""
    return _unprintable.sub(" ", text).encode(errors="replace")[:limit].decode(errors="ignore")


def name_of(peer: PeerID) -> str:
    """The name of a peer in tables and labels: the last 8 characters of its id."""
    return str(peer)[-8:]


def encode_health(health: Health) -> msgspec.Raw:
    """Encode a record."""
    return msgspec.Raw(msgspec.msgpack.encode(health))


def decode_health(record: bytes) -> Health:
    """Decode a record of any peer. Raises ValueError if it breaks a bound."""
    if len(record) > MAX_BYTES:
        raise ValueError(f"a health record of {len(record)} bytes: at most {MAX_BYTES} count")
    try:
        return _decoder.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a health record: {error}") from error


_unprintable = re.compile(f"[{UNPRINTABLE}]")
_decoder = msgspec.msgpack.Decoder(Health)
