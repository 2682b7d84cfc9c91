"""The events that an `Optimizer` passes to its `on_event`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A global epoch was committed, and this peer has made its step. Times are in seconds, sizes in bytes of payload of
    this peer.

    Attributes:
        epoch: the number of the new epoch.
        samples: accumulated by all peers together.
        num_peers: the number of members of the round.
        coordinator: the text form of the peer id of the coordinator.
        round_seconds: from this peer's JOIN to the commit.
        matchmaking_seconds: the part of it until BEGIN.
        allreduce_seconds: the rest of it.
        bytes_sent, bytes_received: in the round.
        waiting_seconds: for the others' samples, in all of the epoch, before its round.
        step_seconds: of the optimizer's step.
        state_digest: 64 hex digits, of the parameters after the step.
        tip: names the state in the run, see `Optimizer.tip`.
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

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.samples:g} samples of {_peers(self.num_peers)}, "
            f"round {self.round_seconds:.3f} s (matchmaking {self.matchmaking_seconds:.3f} s, "
            f"all-reduce {self.allreduce_seconds:.3f} s), {self.bytes_sent / 1e6:.1f} MB sent, "
            f"{self.bytes_received / 1e6:.1f} MB received, state {self.state_digest[:8]}, tip {self.tip}"
        )


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """This peer has downloaded a state.

    Attributes:
        epoch: of the state.
        seconds: the duration of the download.
        bytes: the size of the chunks as they were sent.
        donors: the number of peers that sent it.
        state_digest: 64 hex digits, of the parameters.
    """

    epoch: int
    seconds: float
    bytes: int
    donors: int
    state_digest: str

    def __str__(self) -> str:
        return (
            f"downloaded the state of epoch {self.epoch} from {_peers(self.donors)}: {self.bytes / 1e6:.1f} MB in "
            f"{self.seconds:.2f} s, state {self.state_digest[:8]}"
        )


@dataclass(frozen=True, slots=True)
class ForkReport:
    """The run has forked: peers hold states of which none follows from the other; or its owner has pinned a state.

    Attributes:
        stays: whether this peer's side is the one that is kept. Else this peer has left its state for the other.
        tip: of this peer's state, before it left it; as `shoal keys pin` takes it.
        samples: behind that state.
        members: the text forms of the peer ids of those with whom this peer made it, as far as is known.
        other_tip, other_samples, other_members: the same of the other state.
        reason: why that side is kept.
        kept: where the state lies that this peer has left, in words: a file, its memory, or nowhere.
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


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """This peer can't reach known members of the run, or finds no member; or it reaches all of them again.

    Attributes:
        num_peers: the number of members that this peer is connected to, itself included. Two clients of a node are
            connected to it, and not to each other.
        unreached: the text forms of the peer ids of the known members that this peer should reach and does not; empty
            when all that it reported are reached or have left.
        advice: the problem and what to do about it, as in the log's warning; "" when all members are reached again.
    """

    num_peers: int
    unreached: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        return self.advice or f"all members are reached again: {_peers(self.num_peers)}"


def fields_of_event(event: Event) -> dict[str, object]:
    """The fields of the log record that tells of an event, as `extra=` of `logging`."""
    kind = type(event).__name__.removesuffix("Report").lower()
    return {"shoal": {"event": kind, **asdict(event)}}


Event = EpochReport | DownloadReport | ReachabilityReport | ForkReport
