"""The summary of a demo run: its numbers, and all problems."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

import msgspec

from shoal.cli.demo.messages import Committed
from shoal.cli.demo.record import Record
from shoal.cli.demo.settings import ENOUGH_EPOCHS, DemoSettings


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result, as written to ``report.json``. Times are in seconds, losses in nats per character.

    ``None`` means that the event did not happen or nothing could be measured. The run is a success if ``problems`` is
    empty. ``unreached`` lists goals for which a run had too few epochs.
    """

    settings: DemoSettings
    epochs: int
    epochs_compared: int
    digests_equal: bool
    loss_before: float | None
    loss_after: float | None
    bigram_loss: float | None
    median_epoch_seconds: float | None
    median_round_seconds: float | None
    median_matchmaking_seconds: float | None
    median_allreduce_seconds: float | None
    median_round_bytes: float | None
    recovery_seconds: float | None
    catch_up_seconds: float | None
    catch_up_after_start_seconds: float | None
    total_seconds: float
    problems: list[str]
    unreached: list[str]


def summarise(record: Record, settings: DemoSettings) -> Summary:
    """Sum up a record. A pure function. ``record.ended_at`` must be set.

    ``recovery_seconds`` is the time from SIGKILL to the next epoch that the others commit. ``catch_up_seconds`` is the
    time from when the newcomer has its model and optimizer to its first commit. ``catch_up_after_start_seconds`` is the
    same from the start of its process, which first imports torch and reads the text.
    """
    assert record.ended_at is not None
    commits = record.commits()
    reports = [report for group in commits.values() for report in group]
    compared = [group for group in record.digests().values() if len(group) > 1]
    first_commits = [min(report.at for report in group) for group in commits.values()]
    ready_at, started_at, joined_at = _newcomer_times(record)
    finals = _final_losses(record, settings)
    problems, late = _problems(record, settings, commits), _late(record, settings)
    return Summary(
        settings=settings,
        epochs=len(commits),
        epochs_compared=len(compared),
        digests_equal=all(len(set(group)) == 1 for group in compared),
        loss_before=record.evaluations[0].held_out_loss if record.evaluations else None,
        loss_after=finals[-1] if finals else None,
        bigram_loss=record.baseline.bigram_loss if record.baseline else None,
        median_epoch_seconds=_median(after - before for before, after in pairwise(first_commits)),
        median_round_seconds=_median(report.round_seconds for report in reports),
        median_matchmaking_seconds=_median(report.matchmaking_seconds for report in reports),
        median_allreduce_seconds=_median(report.allreduce_seconds for report in reports),
        median_round_bytes=_median(sum(report.bytes_sent for report in group) for group in commits.values()),
        recovery_seconds=_recovery_seconds(record),
        catch_up_seconds=_elapsed(ready_at, joined_at),
        catch_up_after_start_seconds=_elapsed(started_at, joined_at),
        total_seconds=record.ended_at - record.started_at,
        problems=problems + ([] if settings.is_short else late),
        unreached=late if settings.is_short else [],
    )


def _problems(record: Record, settings: DemoSettings, commits: dict[int, list[Committed]]) -> list[str]:
    problems = list(record.failures)
    for epoch, digests in record.digests().items():
        if len(set(digests)) > 1:
            problems.append(f"in epoch {epoch} {len(digests)} peers had {len(set(digests))} different states")
    if settings.peers > 1 and all(len(group) < 2 for group in commits.values()):
        problems.append("no epoch was committed by more than one peer")
    killed = [peer for peer in record.peers.values() if peer.killed_at is not None]
    if settings.kill and not killed:
        problems.append("no peer was killed: the run ended before it was due")
    if killed and _recovery_seconds(record) is None:
        problems.append("no epoch was committed after the kill")
    if record.newcomer is None:
        problems.append("no newcomer was started: the run ended before it was due")
    if record.baseline is None or not _final_losses(record, settings):
        problems.append("the held-out loss at the end was not measured")
    return problems


def _late(record: Record, settings: DemoSettings) -> list[str]:
    """Goals that were not reached and that need time. In a short run they are no problem."""
    late = []
    usually = f"; it takes some {ENOUGH_EPOCHS} epochs" if settings.is_short else ""
    if record.newcomer is not None and not record.peers[record.newcomer].committed:
        late.append(f"the newcomer, peer {record.newcomer}, committed no epoch{usually}")
    finals = _final_losses(record, settings)
    if finals and record.baseline is not None and not finals[-1] < (bigram := record.baseline.bigram_loss):
        late.append(f"the held-out loss {finals[-1]:.3f} is not below the bigram model's {bigram:.3f}{usually}")
    return late


def _final_losses(record: Record, settings: DemoSettings) -> list[float]:
    return [found.held_out_loss for found in record.evaluations if found.epoch >= settings.epochs]


def _recovery_seconds(record: Record) -> float | None:
    victim = next((peer for peer in record.peers.values() if peer.killed_at is not None), None)
    if victim is None or victim.killed_at is None:
        return None
    # Peers report a commit one after the other. So an epoch that any peer, even the victim, had reported before the
    # kill is not the next one.
    reports = [report for peer in record.peers.values() for report in peer.committed.values()]
    before = max((report.epoch for report in reports if report.at <= victim.killed_at), default=-1)
    return _elapsed(victim.killed_at, min((report.at for report in reports if report.epoch > before), default=None))


def _newcomer_times(record: Record) -> tuple[float | None, float | None, float | None]:
    """When the newcomer was ready, when it was started, and when it first committed."""
    if record.newcomer is None:
        return None, None, None
    peer = record.peers[record.newcomer]
    return peer.ready_at, peer.started_at, min((report.at for report in peer.committed.values()), default=None)


def _elapsed(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
