"""What is known of a run, made of health records and of connections: a state machine without I/O.

Times are in seconds of the caller's clock. What it believes of a peer is what that peer has signed, and what the caller
has seen of its own connection to it.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.health.board import Posted
from shoal.health.record import LIFE_SECONDS, PERIOD_SECONDS, PREFIX_BYTES, Health, Mark, name_of
from shoal.monitor.advice import advice_of
from shoal.monitor.snapshot import Finding, Happening, PeerView, Phases, Snapshot, Standing, Trouble
from shoal.monitor.verdict import sentence_of
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import MAX_MEMBERS, Role

LATE_SECONDS = 1.5 * PERIOD_SECONDS  # without a record, and a peer is silent
TOLD_SECONDS = 600.0  # for which a lost peer is part of the sentence
ALONE_SECONDS = 2 * PERIOD_SECONDS  # that two peers have to meet
MAX_MARKS = 64  # of one peer
MAX_HAPPENINGS = 200
NOT_COMPARED = bytes(PREFIX_BYTES)

T = TypeVar("T", bytes, str)


@dataclass(slots=True)
class _Peer:
    """One peer.

    Attributes:
        peer: who it is.
        health: its newest record; `before`: the one before it, of the same start.
        heard_at: when the newest was published, as far as is known; `first_at`: when the first was seen.
        standing: see `Standing`; `why`: of LOST; `since`: when it got there.
        unreachable: why this process can't connect to it; "" if it is connected, or was not tried.
        marks: by epoch.
    """

    peer: PeerID
    health: Health
    heard_at: float
    first_at: float
    since: float
    before: Health | None = None
    standing: Standing = Standing.HERE
    why: str = ""
    unreachable: str = ""
    marks: dict[int, Mark] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        return self.standing in (Standing.HERE, Standing.SILENT)


class Picture:
    """A run, as whoever watches it knows it.

    Args:
        run_id: its name.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._peers: dict[PeerID, _Peer] = {}
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._read_at = float("-inf")  # when the last reading of the board began
        self._is_first = True  # what is read first has happened before

    # -- what happens

    def read(self, posts: Iterable[Posted], began: float, now: float, wall: float) -> None:
        """The board was read.

        Args:
            posts: what was there.
            began: when the reading began.
            now: when it ended.
            wall: the same by the clock that records are published by.
        """
        for posted in posts:
            age = min(max(0.0, wall - posted.at), LIFE_SECONDS)
            self._read(posted, now - age, now, wall)
        self._read_at, self._is_first = began, False
        self.tick(now, wall)

    def _read(self, posted: Posted, heard_at: float, now: float, wall: float) -> None:
        peer, health = posted.peer, posted.health
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= MAX_MEMBERS and not self._forget_one():
                return
            known = self._peers[peer] = _Peer(peer, health, heard_at, now, now)
            known.marks = {mark.epoch: mark for mark in health.marks}
            if health.left:
                known.standing = Standing.LEFT
            elif not self._is_first:
                self._tell(wall, peer, "has joined")
            return
        if health.order <= known.health.order:
            return
        last, restarted = known.health, health.started != known.health.started
        # What was not there when a reading began after the loss was published after it; this may be older.
        may_be_older = known.standing is Standing.LOST and not restarted and self._read_at <= known.since
        known.before, known.health, known.heard_at = None if restarted else last, health, max(known.heard_at, heard_at)
        known.marks |= {mark.epoch: mark for mark in health.marks}
        for epoch in sorted(known.marks)[:-MAX_MARKS]:
            del known.marks[epoch]
        if restarted:
            known.marks = {mark.epoch: mark for mark in health.marks}
        if health.left:
            self._stand(known, Standing.LEFT, "", now)
            self._tell(wall, peer, "has left")
            return
        if may_be_older:
            return
        if known.standing in (Standing.LOST, Standing.LEFT):
            self._tell(wall, peer, "is back, started anew" if restarted else "is back")
        elif restarted:
            self._tell(wall, peer, "was started anew")
        if known.standing is not Standing.HERE:
            self._stand(known, Standing.HERE, "", now)
        self._compare(known.before, health, peer, wall)

    def _compare(self, before: Health | None, health: Health, peer: PeerID, wall: float) -> None:
        """Tell what has happened between two records."""
        if health.totals.downloads > (0 if before is None else before.totals.downloads):
            self._tell(wall, peer, f"has downloaded the state of epoch {health.epoch}")
        fault = health.fault
        if fault is not None and fault != (None if before is None else before.fault):
            self._tell(wall, peer, f"{fault.kind.value}: {fault.reason}")
        refused = health.refused
        if refused is not None and (before is None or before.refused is None):
            self._tell(wall, peer, f"refuses a peer with other terms: {refused.difference}")

    def connected(self, peer: PeerID) -> None:
        """This process has a connection to that peer."""
        known = self._peers.get(peer)
        if known is not None:
            known.unreachable = ""

    def lost(self, peer: PeerID, reason: str, now: float, wall: float) -> None:
        """The connection to that peer has ended, and another one could not be made."""
        known = self._peers.get(peer)
        if known is not None and known.is_there:
            self._stand(known, Standing.LOST, reason, now)
            self._tell(wall, peer, f"was lost: {reason}")

    def unreachable(self, peer: PeerID, reason: str) -> None:
        """That peer was dialled in vain."""
        known = self._peers.get(peer)
        if known is not None:
            known.unreachable = reason

    def tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        for known in self._peers.values():
            age = now - known.heard_at
            if known.is_there and age > LIFE_SECONDS:
                self._stand(known, Standing.LOST, f"it has said nothing for {age:.0f} s", now)
                self._tell(wall, known.peer, f"was lost: {known.why}")
            elif known.standing is Standing.HERE and age > LATE_SECONDS:
                self._stand(known, Standing.SILENT, "", now)

    @staticmethod
    def _stand(known: _Peer, standing: Standing, why: str, now: float) -> None:
        known.standing, known.why, known.since = standing, why, now

    def _tell(self, wall: float, peer: PeerID, what: str) -> None:
        self._happenings.append(Happening(wall, name_of(peer), what))

    def _forget_one(self) -> bool:
        """Make room for a peer, if one is gone."""
        gone = [known for known in self._peers.values() if not known.is_there]
        if not gone:
            return False
        del self._peers[min(gone, key=lambda known: known.since).peer]
        return True

    # -- what is known

    def expected(self) -> list[PeerID]:
        """The peers that are there, and listen: those to be connected to."""
        return [k.peer for k in self._peers.values() if k.is_there and k.health.role is not Role.CLIENT]

    def records(self) -> list[tuple[PeerID, Health]]:
        """The newest record of each peer that is there."""
        return [(known.peer, known.health) for known in self._peers.values() if known.is_there]

    def snapshot(self, now: float, wall: float) -> Snapshot:
        """The run now."""
        here = [known for known in self._peers.values() if known.is_there]
        findings, alike = self._findings(here, now)
        epoch = max((known.health.epoch for known in here), default=0)
        best = max((known.health for known in here), key=lambda health: health.samples_behind, default=None)
        paces = [known.health.epoch_seconds for known in here if known.health.epoch_seconds > 0]
        pace = statistics.median(paces) if paces else 0.0
        speed, common = sum(known.health.samples_per_second for known in here), _common_epoch(here)
        order = sorted(self._peers.values(), key=lambda known: (not known.is_there, name_of(known.peer)))
        views = tuple(_view(known, findings.get(known.peer, []), speed, common, now) for known in order)
        told = [v for v, k in zip(views, order, strict=True) if k.is_there or self._is_told(k, now)]
        is_well, sentence = sentence_of(
            self.run_id, told, epoch, pace, alike=alike, refused=self._refused([known.health for known in here])
        )
        phases = _mean([view.phases for view in views if view.phases is not None and view.standing is Standing.HERE])
        sent = [known.health.last.sent for known in here if known.health.last is not None]
        return Snapshot(
            run_id=self.run_id,
            at=wall,
            is_well=is_well,
            sentence=sentence,
            epoch=epoch,
            samples_behind=0.0 if best is None else best.samples_behind,
            epoch_seconds=pace,
            loss=_loss_of([known.health for known in here]),
            samples=max((known.health.all_samples for known in here if known.health.epoch == epoch), default=0.0),
            target=max((known.health.target for known in here), default=0.0),
            samples_per_second=speed,
            phases=phases,
            advice="" if phases is None else advice_of(phases, statistics.fmean(sent) if sent else 0.0, len(here)),
            peers=views,
            happenings=tuple(self._happenings),
        )

    @staticmethod
    def _is_told(known: _Peer, now: float) -> bool:
        return known.standing is Standing.LOST and now - known.since < TOLD_SECONDS

    def _refused(self, here: Sequence[Health]) -> list[str]:
        """What members say of peers with other terms that publish nothing themselves."""
        told = {h.refused.key: h.refused.difference for h in here if h.refused is not None}
        shown = {known.peer.key[:PREFIX_BYTES] for known in self._peers.values() if known.is_there}
        return [
            f"a peer ({key.hex()}) was refused, since it {Trouble.TERMS.value} ({difference})"
            for key, difference in told.items()
            if key not in shown
        ]

    def _findings(self, here: list[_Peer], now: float) -> tuple[dict[PeerID, list[Finding]], int]:
        """What is wrong with whom, the worst first, and how many hold the same parameters."""
        found: dict[PeerID, list[Finding]] = {known.peer: [] for known in self._peers.values()}
        others, alike = _unlike(here)
        version = _common([(known.health.version, known.health) for known in here])
        terms = _common([(known.health.terms, known.health) for known in here])
        differences = {h.refused.key: h.refused.difference for k in here if (h := k.health).refused is not None}
        unreached = Counter(key for known in here for key in known.health.unreached)
        for known in self._peers.values():
            add, health, prefix = found[known.peer].append, known.health, known.peer.key[:PREFIX_BYTES]
            if self._is_told(known, now):
                add(Finding(Trouble.LOST, f"{now - known.since:.0f} s ago: {known.why}"))
            if not known.is_there:
                continue
            if known.standing is Standing.SILENT:
                add(Finding(Trouble.SILENT, f"for {now - known.heard_at:.0f} s, where {PERIOD_SECONDS:.0f} are usual"))
            if health.terms != terms:
                add(Finding(Trouble.TERMS, differences.get(prefix, "they are not those of most")))
            if health.version != version:
                add(Finding(Trouble.VERSION, f"{health.version}, and most run {version}"))
            if known.peer in others:
                add(others[known.peer])
            if health.members == 1 and any(
                other is not known and now - max(other.first_at, known.first_at) > ALONE_SECONDS for other in here
            ):
                add(Finding(Trouble.ALONE, "it is connected to none of the others"))
            if unreached[prefix]:
                add(Finding(Trouble.UNREACHABLE, f"by {unreached[prefix]} of the others"))
            elif known.unreachable:
                add(Finding(Trouble.UNREACHABLE, f"from here: {known.unreachable}"))
            if health.newest > health.epoch + 1:
                add(Finding(Trouble.BEHIND, f"in epoch {health.epoch}, where others are in {health.newest}"))
        return found, alike


def _common(values: list[tuple[T, Health]]) -> T | None:
    """The value that most peers have; of equally many, that with more samples behind it."""
    counts = Counter(value for value, _ in values)
    behind = {value: max(h.samples_behind for other, h in values if other == value) for value in counts}
    return max(counts, key=lambda value: (counts[value], behind[value], value), default=None)


def _unlike(here: Sequence[_Peer]) -> tuple[dict[PeerID, Finding], int]:
    """Compares the states of peers at the newest epoch that each has in common with another. Returns who differs from
    most, and how many were found equal."""
    at: dict[int, list[_Peer]] = {}
    for known in here:
        for epoch in known.marks:
            at.setdefault(epoch, []).append(known)
    found: dict[PeerID, Finding] = {}
    alike = 0
    for known in here:
        shared = [epoch for epoch in known.marks if len(at[epoch]) > 1]
        if not shared:
            continue
        epoch = max(shared)
        mark, same = known.marks[epoch], at[epoch]
        line = _common([(other.marks[epoch].lineage, other.health) for other in same])
        of_kind = [other for other in same if other.health.machine == known.health.machine]
        of_kind = [other for other in of_kind if other.marks[epoch].lineage == mark.lineage]
        digest = _common([(other.marks[epoch].digest, other.health) for other in of_kind])
        if mark.lineage != line:
            found[known.peer] = Finding(Trouble.FORKED, f"in epoch {epoch}")
        elif mark.digest != digest and NOT_COMPARED not in (mark.digest, digest):
            found[known.peer] = Finding(Trouble.UNLIKE, f"than {len(of_kind) - 1} like it, in epoch {epoch}")
        else:
            alike += 1
    return found, alike


def _common_epoch(here: Sequence[_Peer]) -> int:
    """The newest of the epochs whose states are known of most peers."""
    counts = Counter(epoch for known in here for epoch in known.marks)
    return max(counts, key=lambda epoch: (counts[epoch], epoch), default=0)


def _loss_of(records: Sequence[Health]) -> float | None:
    told = [(health.loss, max(health.samples_per_second, 1e-9)) for health in records if health.loss is not None]
    return sum(loss * weight for loss, weight in told) / sum(weight for _, weight in told) if told else None


def _phases_of(health: Health) -> Phases | None:
    last = health.last
    if last is None:
        return None
    spent = last.waiting + last.matchmaking + last.exchange + last.step
    return Phases(max(0.0, health.epoch_seconds - spent), last.waiting, last.matchmaking, last.exchange, last.step)


def _mean(phases: Sequence[Phases]) -> Phases | None:
    if not phases:
        return None
    return Phases(
        statistics.fmean(each.computing for each in phases),
        statistics.fmean(each.waiting for each in phases),
        statistics.fmean(each.matchmaking for each in phases),
        statistics.fmean(each.exchange for each in phases),
        statistics.fmean(each.step for each in phases),
    )


def _view(known: _Peer, findings: Sequence[Finding], speed: float, common: int, now: float) -> PeerView:
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
        mark="" if mark is None else mark.digest.hex(),
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
    )
