"""What an `Optimizer` tells whoever listens to its `on_event`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.reach import Reachability


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A global epoch was committed and the step made. Times in seconds, sizes in bytes of payload of this peer.

    Attributes:
        epoch: the number of the new epoch.
        samples: that all peers together had accumulated.
        num_peers: that took part.
        coordinator: the text form of the peer id of who called the round.
        round_seconds: from the moment this peer joined to the commit.
        matchmaking_seconds: the part of it until BEGIN.
        allreduce_seconds: the rest of it.
        bytes_sent, bytes_received: in the round.
        state_digest: 64 hex digits, of the parameters after the step.
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

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.samples:g} samples of {_peers(self.num_peers)}, "
            f"round {self.round_seconds:.3f} s (matchmaking {self.matchmaking_seconds:.3f} s, "
            f"all-reduce {self.allreduce_seconds:.3f} s), {self.bytes_sent / 1e6:.1f} MB sent, "
            f"{self.bytes_received / 1e6:.1f} MB received, state {self.state_digest[:8]}"
        )


@dataclass(frozen=True, slots=True)
class DownloadReport:
    """A state was downloaded.

    Attributes:
        epoch: of the state.
        seconds: that it took.
        bytes: of the chunks as they were sent.
        donors: how many peers brought it.
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


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """Known members of the run can't be reached, or nobody is there; or all is well again.

    Attributes:
        num_peers: members of the run that this peer is connected to, itself included. Two clients of a node are
            connected to it, and not to each other.
        unreached: the text forms of the peer ids of the members that it knows and should reach and does not; none when
            all of whom it told are reached or have left.
        advice: what is wrong and what to do about it, as the warning in the log says it; "" when all is well again.
    """

    num_peers: int
    unreached: tuple[str, ...]
    advice: str

    def __str__(self) -> str:
        return self.advice or f"all members are reached again: {_peers(self.num_peers)}"


Event = EpochReport | DownloadReport | ReachabilityReport


def report_of(outcome: Outcome, epoch: int, digest: bytes) -> EpochReport:
    """What there is to tell of a round, given the epoch that begins after it and the digest of the parameters."""
    return EpochReport(
        epoch=epoch,
        samples=outcome.commit.samples,
        num_peers=len(outcome.begin.members),
        coordinator=str(outcome.coordinator),
        round_seconds=outcome.matchmaking_seconds + outcome.allreduce_seconds,
        matchmaking_seconds=outcome.matchmaking_seconds,
        allreduce_seconds=outcome.allreduce_seconds,
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        state_digest=digest.hex(),
    )


def reachability_report_of(reachability: Reachability) -> ReachabilityReport:
    """What there is to tell of a change in whom this peer reaches."""
    unreached = tuple(map(str, reachability.unreached))
    return ReachabilityReport(reachability.num_peers, unreached, reachability.advice)
