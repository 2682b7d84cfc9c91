"""The events that an `Optimizer` passes to its `on_event`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class EpochReport:
    """The peers have ended an epoch with a round, and this peer has made its step.

    Attributes:
        epoch: the number of the new epoch.
        samples: the number of samples that all peers together accumulated.
        num_peers: the number of members of the round.
        coordinator: the peer id of the coordinator, as text.
        round_seconds: the time in seconds from this peer's JOIN to the commit.
        matchmaking_seconds: the part of this time until the round began.
        allreduce_seconds: the rest of this time.
        bytes_sent: the bytes of payload that this peer sent in the round.
        bytes_received: the bytes of payload that this peer received in the round.
        waiting_seconds: the time in seconds that this peer waited in the epoch, before its round, for samples of other
            peers.
        step_seconds: the time in seconds of the optimizer's step.
        state_digest: the hash of the parameters after the step, 64 hex digits.
        tip: the name of the state in the run, see `Optimizer.tip`.
        grad_norm: the norm of the averaged gradient (of the averaged drift with an outer optimizer) before
            `max_grad_norm` has scaled it; None without `max_grad_norm`, and at an auxiliary peer.
        own_samples: those of the samples that are this peer's; 0.0 if the round was made without it.
    """

    epoch: int
    samples: float
    num_peers: int
    coordinator: str
    round_seconds: float
    matchmaking_seconds: float
    allreduce_seconds: float
    bytes_sent: int
    bytes_received: int
    state_digest: str
    tip: str = ""
    waiting_seconds: float = 0.0
    step_seconds: float = 0.0
    grad_norm: float | None = None
    own_samples: float = 0.0

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.samples:g} samples of {_peers(self.num_peers)}, "
            f"round {self.round_seconds:.3f} s (matchmaking {self.matchmaking_seconds:.3f} s, "
            f"all-reduce {self.allreduce_seconds:.3f} s), {_size(self.bytes_sent)} sent, "
            f"{_size(self.bytes_received)} received, state {self.state_digest[:8]}, tip {self.tip}"
        )


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """This peer has downloaded a state from other peers.

    Attributes:
        epoch: the epoch of the state.
        seconds: the duration of the download in seconds.
        bytes: the size of the state as it was sent, after compression.
        donors: the number of peers that sent it.
        state_digest: the hash of the parameters, 64 hex digits.
    """

    epoch: int
    seconds: float
    bytes: int
    donors: int
    state_digest: str

    def __str__(self) -> str:
        return (
            f"downloaded the state of epoch {self.epoch} from {_peers(self.donors)}: {_size(self.bytes)} in "
            f"{self.seconds:.2f} s, state {self.state_digest[:8]}"
        )


@dataclass(frozen=True, slots=True)
class ForkReport:
    """The run has forked: peers hold two states of which neither follows from the other. Or the owner has pinned a
    state that does not follow from this peer's.

    Attributes:
        stays: True if this peer keeps its state. False if it has left its state for the other one.
        tip: the name of this peer's state, before it left it; `shoal keys pin` takes it.
        samples: the number of samples behind this state.
        members: the peer ids, as text, of the known peers that made this state, this peer included.
        other_tip: the name of the other state.
        other_samples: the number of samples behind the other state.
        other_members: the peer ids, as text, of known peers that hold the other state.
        reason: why this side is kept.
        kept: where the state is that this peer has left, and how to load it, in words: in a file, in memory, or lost.
            "" if it stays.
    """

    stays: bool
    tip: str
    samples: float
    members: tuple[str, ...]
    other_tip: str
    other_samples: float
    other_members: tuple[str, ...]
    reason: str
    kept: str

    def __str__(self) -> str:
        mine = f"{self.tip} ({self.samples:g} samples, with {', '.join(self.members) or 'nobody'})"
        other = f"{self.other_tip} ({self.other_samples:g} samples, of {', '.join(self.other_members) or 'nobody'})"
        if self.stays:
            return f"the run has forked: this peer stays at {mine}; the other side is at {other}: {self.reason}"
        return f"the run has forked: this peer has left {mine}, which is {self.kept}, for {other}: {self.reason}"


def _size(count: int) -> str:
    """A number of bytes as people read it: small models send a few kB."""
    if count < 1e6:
        return f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} B"
    return f"{count / 1e6:.1f} MB"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """This peer can't reach some known members of the run, or finds no member; or it reaches all of them again.

    Attributes:
        num_peers: the number of members that this peer is connected to, itself included. Two clients of a node are
            connected to the node, and not to each other.
        unreached: the peer ids, as text, of the known members that this peer should reach and does not. Empty if this
            peer reaches all members that it has reported, or if they have left.
        advice: the problem and what to do about it, as in the log's warning; "" if this peer reaches all members again.
    """

    num_peers: int
    unreached: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        return self.advice or f"all members are reached again: {_peers(self.num_peers)}"


def fields_of_event(event: Event) -> dict[str, object]:
    """The fields of the log record of an event, as `extra=` of `logging`."""
    kind = type(event).__name__.removesuffix("Report").lower()
    return {"shoal": {"event": kind, **asdict(event)}}


Event = EpochReport | DownloadReport | ReachabilityReport | ForkReport
