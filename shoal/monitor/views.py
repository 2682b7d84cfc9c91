"""Makes what is shown of a peer, and means over several peers. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from shoal.health.record import Health, name_of
from shoal.monitor.findings import NOT_COMPARED
from shoal.monitor.known import SeenPeer
from shoal.monitor.snapshot import Finding, PeerView, Phases


def loss_of(records: Sequence[Health]) -> float | None:
    """The mean of the reported losses, weighted by samples per second; None if there are none."""
    told = [(health.loss, max(health.samples_per_second, 1e-9)) for health in records if health.loss is not None]
    whole = sum(weight for _, weight in told)
    return sum(loss * (weight / whole) for loss, weight in told) if told else None  # divides first: nothing overflows


def _phases_of(health: Health) -> Phases | None:
    last = health.last
    if last is None:
        return None
    spent = last.waiting + last.matchmaking + last.exchange + last.step
    return Phases(max(0.0, health.epoch_seconds - spent), last.waiting, last.matchmaking, last.exchange, last.step)


def mean_of(phases: Sequence[Phases]) -> Phases | None:
    """The mean of the phases; None if there are none."""
    if not phases:
        return None
    return Phases(
        statistics.fmean(each.computing for each in phases),
        statistics.fmean(each.waiting for each in phases),
        statistics.fmean(each.matchmaking for each in phases),
        statistics.fmean(each.exchange for each in phases),
        statistics.fmean(each.step for each in phases),
    )


def _joining(known: SeenPeer, now: float) -> str:
    joining = known.health.joining
    if joining is None or not known.is_there:
        return ""
    if not joining.of:
        return "it asks for the state"
    left = known.left(joining.seconds, now)
    return f"{joining.has / 1e6:.1f} of {joining.of / 1e6:.1f} MB" + (f", {left:.0f} s left" if left else "")


def view_of(known: SeenPeer, findings: Sequence[Finding], speed: float, common: int, now: float) -> PeerView:
    """What is shown of a peer.

    Args:
        known: what is known of it.
        findings: in which ways it is not well.
        speed: the samples per second of all peers.
        common: the epoch whose state is shown.
        now: the time, on the clock of `known`.
    """
    health, before, totals, last = known.health, known.before, known.health.totals, known.health.last
    up = down = 0.0
    if before is not None and health.at > before.at and known.is_there:
        up = max(0.0, (totals.sent - before.totals.sent) / (health.at - before.at))
        down = max(0.0, (totals.received - before.totals.received) / (health.at - before.at))
    mark = known.marks.get(common)
    return PeerView(
        name=name_of(known.peer),
        id=str(known.peer),
        standing=known.standing,
        why=known.why,
        findings=tuple(findings),
        seen=max(0.0, now - known.heard_at),
        role=health.role.value,
        version=health.version,
        torch=health.torch,
        device=health.device,
        epoch=health.epoch,
        loss=health.loss,
        samples=health.samples,
        share=health.samples_per_second / speed if speed > 0 and known.is_there else 0.0,
        samples_per_second=health.samples_per_second,
        step_seconds=health.step_seconds,
        epoch_seconds=health.epoch_seconds,
        up=up,
        down=down,
        members=health.members,
        mark="" if mark is None or mark.digest == NOT_COMPARED else mark.digest.hex(),
        mark_epoch=0 if mark is None else mark.epoch,
        phases=_phases_of(health),
        round_sent=0 if last is None else last.sent,
        round_received=0 if last is None else last.received,
        round_members=0 if last is None else last.members,
        samples_made=totals.samples,
        steps_made=totals.steps,
        rounds=totals.rounds,
        downloads=totals.downloads,
        faults={kind.value: count for kind, count in health.faults.items()},
        fault="" if health.fault is None else f"{health.fault.kind.value}: {health.fault.reason}",
        cpu_seconds=health.cpu_seconds,
        memory=health.memory,
        joining=_joining(known, now),
    )
