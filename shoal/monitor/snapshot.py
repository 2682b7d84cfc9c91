"""What is known of a run at one moment: plain data, as `top --json` prints it and the page gets it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Standing(StrEnum):
    """Whether a peer is there.

    To LOST from HERE and SILENT, by a connection that ends and can't be made again (of a client: by what the members
    say that held it), or by a record that expires; to HERE from all others, by a newer record; LEFT is what a peer says
    in its last record.
    """

    HERE = "here"
    SILENT = "silent"  # connected, or not known to be lost, and its record is late
    LOST = "lost"
    LEFT = "left"


class Trouble(StrEnum):
    """What a peer can be called that is not well. The words stand after its name, and before details."""

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


class Finding(msgspec.Struct, frozen=True):
    """That a peer is not well: what it is called, and more of it in words."""

    trouble: Trouble
    detail: str

    def __str__(self) -> str:
        return f"{self.trouble.value} ({self.detail})" if self.detail else self.trouble.value


class Phases(msgspec.Struct, frozen=True):
    """Where the time of an epoch goes, in seconds; the mean of the peers.

    Attributes:
        computing: what is left of the epoch.
        waiting: for the samples of others.
        matchmaking: until the round began.
        exchange: of the bytes.
        step: of the optimizer.
    """

    computing: float
    waiting: float
    matchmaking: float
    exchange: float
    step: float


class PeerView(msgspec.Struct, frozen=True):
    """One peer, as it is shown. Sizes are in bytes and bytes per second, times in seconds. The fields that are not
    listed here are those of its record.

    Attributes:
        name: the last characters of its id.
        id: its peer id.
        standing: whether it is there; `why` if it is not.
        findings: what is wrong with it.
        seen: how long ago it said something.
        mark: the beginning of the digest of its parameters in the epoch `mark_epoch`, which most peers have in common;
            "" if it is not known.
        share: of the samples that all make in a second.
        up, down: since its record before the last.
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


class Happening(msgspec.Struct, frozen=True):
    """Something that has happened: when (seconds since 1970), to whom, and what, in words."""

    at: float
    peer: str
    what: str


class Snapshot(msgspec.Struct, frozen=True):
    """A run at one moment.

    Attributes:
        run_id: its name.
        at: seconds since 1970.
        is_well: whether nothing is wrong that is known.
        sentence: that, with the names of those that are not well.
        epoch, samples_behind: of the peer that has come furthest.
        epoch_seconds: of an epoch; 0 if it is not known.
        loss: the mean of those that peers have reported, by their samples per second; None if none has.
        samples, target: in this epoch, of all peers; where it ends.
        counted: what these are, and `samples_per_second`: "samples", or "inner steps" of a run with an outer optimizer.
        samples_per_second: of all peers.
        phases: of the last epochs; None before the first.
        advice: what follows from them.
        peers: all that were seen, those that are there first.
        happenings: the last ones, the newest last.
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
    advice: str
    peers: tuple[PeerView, ...]
    happenings: tuple[Happening, ...]
