"""What is known of a run at one moment: plain data, which `shoal top --json` prints and the page receives."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Standing(StrEnum):
    """Whether a peer is there.

    Attributes:
        HERE: its newest record is not late. A newer record leads here from all other standings.
        SILENT: its next record is late, but it is not known to be lost.
        LOST: its connection has ended and can't be made again, or its record has expired. A client is lost if the
            members with connections to it say so.
        LEFT: it has said in its last record that it leaves.
    """

    HERE = "here"
    SILENT = "silent"
    LOST = "lost"
    LEFT = "left"


class Trouble(StrEnum):
    """The ways in which a peer is not well. The texts follow the name of the peer, and details follow them."""

    LOST = "was lost"
    SILENT = "is silent"
    TERMS = "has other terms"
    VERSION = "runs another version"
    FORKED = "is on another line of the run"
    UNLIKE = "has other parameters"
    ALONE = "trains alone"
    UNREACHABLE = "can't be reached"
    BEHIND = "is behind"
    CLOCK = "has another clock"
    STATE = "can't give newcomers its state"


class Finding(msgspec.Struct, frozen=True):
    """A way in which a peer is not well, with details in words."""

    trouble: Trouble
    detail: str

    def __str__(self) -> str:
        return f"{self.trouble.value} ({self.detail})" if self.detail else self.trouble.value


class Phases(msgspec.Struct, frozen=True):
    """How an epoch spends its time, in seconds.

    Attributes:
        computing: the rest of the epoch, without the other phases.
        waiting: the time until the others had their samples.
        matchmaking: the time until the round began.
        exchange: the time of the all-reduce.
        step: the time of the optimizer's step.
    """

    computing: float
    waiting: float
    matchmaking: float
    exchange: float
    step: float


class PeerView(msgspec.Struct, frozen=True):
    """One peer, as it is shown. Sizes are in bytes, rates in bytes per second, times in seconds. The attributes that
    are not described here are from the peer's record, see `Health`.

    Attributes:
        name: the last characters of its id.
        id: its peer id.
        standing: whether it is there.
        why: why it was lost; "" if it was not.
        findings: in which ways it is not well.
        seen: how long ago its newest record was published.
        mark: the beginning of the digest of its parameters in the epoch `mark_epoch`, which most peers have in common;
            "" if it is not known.
        share: its share of the samples per second of all peers.
        up, down: the rates at which it has sent and received tensors between its last two records.
        joining: how far it has loaded the run's state, in words; "" if it loads none.
    """

    name: str
    id: str
    standing: Standing
    why: str
    findings: tuple[Finding, ...]
    seen: float
    role: str
    version: str
    torch: str
    device: str
    epoch: int
    loss: float | None
    samples: float
    share: float
    samples_per_second: float
    step_seconds: float
    epoch_seconds: float
    up: float
    down: float
    members: int
    mark: str
    mark_epoch: int
    phases: Phases | None
    round_sent: int
    round_received: int
    round_members: int
    samples_made: float
    steps_made: int
    rounds: int
    downloads: int
    faults: dict[str, int]
    fault: str
    cpu_seconds: float
    memory: int
    joining: str


class Happening(msgspec.Struct, frozen=True):
    """An event.

    Attributes:
        at: when it happened, in seconds since 1970.
        peer: the name of the peer.
        what: what happened to the peer, in words.
    """

    at: float
    peer: str
    what: str


class Snapshot(msgspec.Struct, frozen=True):
    """A run at one moment.

    Attributes:
        run_id: the name of the run.
        at: the time, in seconds since 1970.
        is_well: whether no peer is known to be unwell.
        sentence: a summary, with the names of peers that are not well.
        epoch: the newest epoch of any peer.
        samples_behind: the most samples behind the parameters of any peer.
        epoch_seconds: the usual time of an epoch; 0 if it is not known.
        loss: the mean of the losses that peers have reported, weighted by their samples per second; None if none has.
        samples: the samples of all peers in this epoch.
        target: the number of samples at which the epoch ends.
        counted: what these two and `samples_per_second` count: "samples", or "inner steps" with an outer optimizer.
        samples_per_second: the sum over all peers.
        phases: the mean phases of the peers' last epochs; None before the first.
        waits: for how many more seconds the round waits for newcomers that load the state; 0 if it does not.
        advice: how to make epochs shorter; "" while the round waits for newcomers.
        peers: all peers that were seen; those that are there come first.
        happenings: the last events, the newest last.
    """

    run_id: str
    at: float
    is_well: bool
    sentence: str
    epoch: int
    samples_behind: float
    epoch_seconds: float
    loss: float | None
    samples: float
    target: float
    counted: str
    samples_per_second: float
    phases: Phases | None
    waits: float
    advice: str
    peers: tuple[PeerView, ...]
    happenings: tuple[Happening, ...]
