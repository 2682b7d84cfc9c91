"""Translates the optimizer's reports into messages to the parent."""

from __future__ import annotations

import shoal
from shoal.cli.demo.messages import Committed, Downloaded


def as_message(report: shoal.EpochReport | shoal.DownloadReport) -> Committed | Downloaded:
    """The message with the content of ``report``."""
    if isinstance(report, shoal.EpochReport):
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
    return Downloaded(
        epoch=report.epoch,
        seconds=report.seconds,
        bytes=report.bytes,
        donors=report.donors,
        state_digest=report.state_digest,
    )
