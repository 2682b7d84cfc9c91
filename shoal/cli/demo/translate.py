"""The optimizer's reports as messages to the parent: the one place that knows their fields."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from shoal.cli.demo.messages import Committed, Downloaded, Message


@runtime_checkable
class EpochReport(Protocol):
    """What the optimizer reports after a committed epoch."""

    epoch: int
    samples: int
    num_peers: int
    coordinator: str
    round_seconds: float
    matchmaking_seconds: float
    allreduce_seconds: float
    bytes_sent: int
    bytes_received: int
    state_digest: str


@runtime_checkable
class DownloadReport(Protocol):
    """What the optimizer reports after a state download."""

    epoch: int
    seconds: float
    bytes: int
    donors: int


def as_message(report: object) -> Message:
    """``report`` as the message of the same meaning. Raises ``TypeError`` for a report that the demo does not know."""
    if isinstance(report, EpochReport):
        return Committed(
            epoch=report.epoch,
            samples=report.samples,
            num_peers=report.num_peers,
            coordinator=report.coordinator,
            round_seconds=report.round_seconds,
            matchmaking_seconds=report.matchmaking_seconds,
            allreduce_seconds=report.allreduce_seconds,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            state_digest=report.state_digest,
        )
    if isinstance(report, DownloadReport):
        return Downloaded(epoch=report.epoch, seconds=report.seconds, bytes=report.bytes, donors=report.donors)
    raise TypeError(f"the demo knows epoch and download reports, not {type(report).__name__}")
