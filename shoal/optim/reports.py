"""What an `Optimizer` tells whoever listens to its `on_event`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.averaging.contribution import Outcome


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


Event = EpochReport | DownloadReport


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
