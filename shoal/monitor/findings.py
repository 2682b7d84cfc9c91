"""Finds out which peers of a run are not well, and in which way. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from shoal.health.record import PERIOD_SECONDS, PREFIX_BYTES, FaultKind, Health
from shoal.monitor.known import SeenPeer
from shoal.monitor.snapshot import Finding, Standing, Trouble
from shoal.p2p.identity import PeerID

TOLD_SECONDS = 600.0  # a loss is reported for so long
CLOCK_SECONDS = 10.0  # a larger difference of clocks is reported: records live 30 s, by the clock of their writer
ALONE_SECONDS = 2 * PERIOD_SECONDS  # within this time, two peers should have met
BEGINS_SECONDS = 2 * PERIOD_SECONDS  # within this time, a newcomer should have begun to load the state
UNLIKE_SECONDS = 3 * PERIOD_SECONDS  # a peer that has repaired its parameters is reported for so long, by its own clock
NOT_COMPARED = bytes(PREFIX_BYTES)  # a digest that must not be compared

T = TypeVar("T", bytes, str)


def is_told(known: SeenPeer, now: float) -> bool:
    """Whether the loss of this peer is still reported."""
    return known.standing is Standing.LOST and now - known.since < TOLD_SECONDS


def findings_of(peers: Iterable[SeenPeer], now: float) -> tuple[dict[PeerID, list[Finding]], int]:
    """The findings of each peer, the worst first, and how many peers were found to hold equal parameters."""
    peers = list(peers)
    here = [known for known in peers if known.is_there]
    unlike, alike = _unlike(here)
    version = _common((known.health.version, known.health) for known in here)
    terms = _common((known.health.terms, known.health) for known in here)
    differences = _refusals(here)
    unreached = Counter(key for known in here for key in known.health.unreached)
    oldest = sorted(known.first_at for known in here)[:2]
    found: dict[PeerID, list[Finding]] = {known.peer: [] for known in peers}
    for known in peers:
        add, health, prefix = found[known.peer].append, known.health, known.peer.key[:PREFIX_BYTES]
        if is_told(known, now):
            add(Finding(Trouble.LOST, f"{now - known.since:.0f} s ago: {known.why}"))
        if not known.is_there:
            continue
        if known.standing is Standing.SILENT:
            add(Finding(Trouble.SILENT, f"for {now - known.heard_at:.0f} s, where {PERIOD_SECONDS:.0f} are usual"))
        if health.terms != terms:
            add(Finding(Trouble.TERMS, differences.get(prefix, "they are not those of most")))
        if health.version != version:
            add(Finding(Trouble.VERSION, f"{health.version}, and most run {version}"))
        fault = health.fault
        if known.peer in unlike:
            add(unlike[known.peer])
        elif fault is not None and fault.kind is FaultKind.UNLIKE and health.at - fault.at < UNLIKE_SECONDS:
            times = health.faults.get(FaultKind.UNLIKE, 1)
            add(
                Finding(
                    Trouble.UNLIKE, f"than those like it: found {times}x since it started, and mended by a download"
                )
            )
        if health.members == 1 and len(oldest) > 1 and now - max(known.first_at, oldest[1]) > ALONE_SECONDS:
            add(Finding(Trouble.ALONE, "it is connected to none of the others"))
        if unreached[prefix]:
            add(Finding(Trouble.UNREACHABLE, f"by {unreached[prefix]} of the others"))
        elif known.unreachable:
            add(Finding(Trouble.UNREACHABLE, f"from here: {known.unreachable}"))
        failed = fault.reason if fault is not None and fault.kind is FaultKind.DOWNLOAD else ""
        # A peer that could not load the state forgets that others have one, but their records tell, if they are older.
        newest = max([health.newest, *(k.health.epoch for k in here if failed and k.heard_at <= known.heard_at)])
        begins = not health.epoch and not failed and health.at - health.started <= BEGINS_SECONDS
        if newest > health.epoch + 1 and not begins and health.joining is None:
            why = f": {failed}" if failed else ""
            add(Finding(Trouble.BEHIND, f"in epoch {health.epoch}, where others are in {newest}{why}"))
        if FaultKind.STATE in health.faults:
            add(Finding(Trouble.STATE, fault.reason if fault is not None and fault.kind is FaultKind.STATE else ""))
        if abs(known.clock) > CLOCK_SECONDS:
            side = "ahead of" if known.clock > 0 else "behind"
            add(Finding(Trouble.CLOCK, f"at least {abs(known.clock):.0f} s {side} this machine's"))
    return found, alike


def refused_ones(peers: Iterable[SeenPeer]) -> list[str]:
    """Sentences about peers with other terms that publish nothing themselves, from the records of members."""
    here = [known for known in peers if known.is_there]
    shown = {known.peer.key[:PREFIX_BYTES] for known in here}
    return [
        f"a peer ({key.hex()}) was refused, since it {Trouble.TERMS.value} ({difference})"
        for key, difference in _refusals(here).items()
        if key not in shown
    ]


def common_epoch(here: Iterable[SeenPeer]) -> int:
    """The epoch whose state is known of the most peers; the newest one if there are several."""
    counts = Counter(epoch for known in here for epoch in known.marks)
    return max(counts, key=lambda epoch: (counts[epoch], epoch), default=0)


def _refusals(here: Iterable[SeenPeer]) -> dict[bytes, str]:
    """By the beginnings of the keys of refused peers: how their terms differ."""
    said = (known.health.refused for known in here)
    return {refused.key: refused.difference for refused in said if refused is not None}


def _common(values: Iterable[tuple[T, Health]]) -> T | None:
    """The value that most peers have. If several have equally many, it is the one with more samples behind it."""
    counts: Counter[T] = Counter()
    behind: dict[T, float] = {}
    for value, health in values:
        counts[value] += 1
        behind[value] = max(behind.get(value, 0.0), health.samples_behind)
    return max(counts, key=lambda value: (counts[value], behind[value], value), default=None)


def _unlike(here: Sequence[SeenPeer]) -> tuple[dict[PeerID, Finding], int]:
    """Compare the states of peers, for each peer at the newest epoch that it has in common with another one. Lineages
    are compared among all peers, digests among those with the same lineage and machine.

    Returns:
        The findings of peers that differ from most, and how many peers were found to hold equal parameters.
    """
    at: dict[int, list[SeenPeer]] = {}
    for known in here:
        for epoch in known.marks:
            at.setdefault(epoch, []).append(known)
    compared: dict[int, list[SeenPeer]] = {}
    for known in here:
        if shared := [epoch for epoch in known.marks if len(at[epoch]) > 1]:
            compared.setdefault(max(shared), []).append(known)
    found: dict[PeerID, Finding] = {}
    equal = 0
    for epoch, comparing in compared.items():
        line = _common((known.marks[epoch].lineage, known.health) for known in at[epoch])
        bits = _common((known.marks[epoch].digest, known.health) for known in at[epoch])
        kinds: dict[tuple[bytes, bytes], list[SeenPeer]] = {}
        for known in at[epoch]:
            kinds.setdefault((known.marks[epoch].lineage, known.health.machine), []).append(known)
        digests = {kind: _common((k.marks[epoch].digest, k.health) for k in alike) for kind, alike in kinds.items()}
        for known in comparing:
            mark = known.marks[epoch]
            kind = mark.lineage, known.health.machine
            if mark.lineage != line:
                found[known.peer] = Finding(Trouble.FORKED, f"in epoch {epoch}")
            elif mark.digest != digests[kind] and NOT_COMPARED not in (mark.digest, digests[kind]):
                found[known.peer] = Finding(Trouble.UNLIKE, f"than {len(kinds[kind]) - 1} like it, in epoch {epoch}")
            else:
                equal += mark.digest == bits != NOT_COMPARED
    return found, equal
