"""What a watcher knows of a run, from health records and its own connections: a state machine without I/O.

Times are in seconds of the caller's clock. It believes of a peer only what that peer has signed, and what the caller
has seen of its own connection to the peer.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from shoal.health.board import Posted
from shoal.health.record import LIFE_SECONDS, PERIOD_SECONDS, PREFIX_BYTES, Health, name_of, printable
from shoal.monitor.advice import advice_of
from shoal.monitor.findings import common_epoch, findings_of, is_told, refused_ones
from shoal.monitor.known import SeenPeer
from shoal.monitor.snapshot import Happening, Snapshot, Standing
from shoal.monitor.verdict import sentence_of
from shoal.monitor.views import loss_of, mean_of, view_of
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import MAX_MEMBERS

LATE_SECONDS = 1.5 * PERIOD_SECONDS  # a peer without a new record for so long is silent
MAX_HAPPENINGS = 200
MAX_WHY = 400  # bytes of the reason why a connection ended or failed; a peer may have written parts of it


class Picture:
    """What a watcher knows of one run.

    Args:
        run_id: the name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._peers: dict[PeerID, SeenPeer] = {}
        self._named: dict[bytes, PeerID] = {}  # by the beginnings of their keys
        self._coordinators: dict[bytes, float] = {}  # coordinators whose loss was reported, and when
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._read_at = float("-inf")  # when the last reading of the board began
        self._is_first = True  # peers in the first reading have not just joined

    # -- what happens

    def read(self, posts: Iterable[Posted], began: float, now: float, wall: float) -> None:
        """The board was read.

        Args:
            posts: the records on it.
            began: when the reading began.
            now: when it ended.
            wall: when it ended, by the clock of the DHT.
        """
        for posted in posts:
            self._read(posted, now - (wall - posted.at), now, wall)
        self._read_at, self._is_first = began, False
        self._hear_of_clients(now, wall)
        self.tick(now, wall)

    def _read(self, posted: Posted, said_at: float, now: float, wall: float) -> None:
        """A record was read. `said_at` is the time at which its peer claims to have published it."""
        peer, health = posted.peer, posted.health
        # It was published after the last reading began, which did not find it, and before now. If its peer says
        # otherwise, a clock is wrong.
        heard_at = min(max(said_at, self._read_at, now - LIFE_SECONDS), now)
        clock = said_at - heard_at if self._read_at > now - LIFE_SECONDS else max(0.0, said_at - now)
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= MAX_MEMBERS and not self._forget_one():
                return
            known = self._peers[peer] = SeenPeer(peer, health, heard_at, now, now, now, clock_before=clock)
            self._named[peer.key[:PREFIX_BYTES]] = peer
            if health.left:
                known.standing = Standing.LEFT
            elif not self._is_first:
                self._tell(wall, peer, "has joined")
            return
        if health.order <= known.health.order:
            return
        restarted = health.started != known.health.started
        # The record proves that the peer is alive only if it was published after the loss. That is certain if a reading
        # that began after the loss did not find it.
        may_be_older = known.standing is Standing.LOST and not restarted and self._read_at <= known.since
        known.heard(health, heard_at, clock, now)
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
        """Report what has happened between two records."""
        if health.totals.downloads > (0 if before is None else before.totals.downloads):
            self._tell(wall, peer, f"has downloaded the state of epoch {health.epoch}")
        fault = health.fault
        if fault is not None and fault != (None if before is None else before.fault):
            self._tell(wall, peer, f"{fault.kind.value}: {fault.reason}")
        refused = health.refused
        if refused is not None and (before is None or before.refused is None):
            self._tell(wall, peer, f"refuses a peer with other terms: {refused.difference}")
        out = health.put_out
        if out is not None and out != (None if before is None else before.put_out):
            self._tell(wall, peer, f"has put …{self._name(out.key)} out of a round: {out.reason}")
        lost = [loss.key for loss in health.lost if loss.coordinated and (before is None or loss not in before.lost)]
        # Several peers report the same loss, but it is shown once.
        self._coordinators = {key: at for key, at in self._coordinators.items() if at > wall - LIFE_SECONDS}
        if lost and lost[-1] in self._named and lost[-1] not in self._coordinators:
            self._coordinators[lost[-1]] = wall
            self._tell(wall, peer, f"has lost the coordinator, …{self._name(lost[-1])}")

    def _hear_of_clients(self, now: float, wall: float) -> None:
        """Find lost clients, which this process can't dial. A client is lost if more than half of the members with a
        connection to it say so, and at least two of them if two members listen. Reports from before its newest record
        was read do not count."""
        listening = [k for k in self._peers.values() if k.standing is Standing.HERE and not k.is_client]
        tellers: dict[PeerID, set[PeerID]] = {}
        for teller in listening:
            for (key, _), since in teller.losses.items():
                client = self._peers[self._named[key]] if key in self._named else teller
                if client.is_client and client.is_there and since >= client.read_at:
                    tellers.setdefault(client.peer, set()).add(teller.peer)
        for peer, say_so in tellers.items():
            client = self._peers[peer]
            held_by = min(len(listening), max(1, client.health.members - 1))
            if len(say_so) >= max(held_by // 2 + 1, min(2, len(listening))):
                self._lose(client, f"{len(say_so)} of {len(listening)} members that listen have lost it", now, wall)

    def connected(self, peer: PeerID) -> None:
        """This process has a connection to that peer."""
        known = self._peers.get(peer)
        if known is not None:
            known.unreachable = ""

    def lost(self, peer: PeerID, reason: str, now: float, wall: float) -> None:
        """The connection to that peer has ended, and another one could not be made."""
        known = self._peers.get(peer)
        if known is not None and known.is_there:
            self._lose(known, printable(reason, MAX_WHY), now, wall)

    def unreachable(self, peer: PeerID, reason: str) -> None:
        """An attempt to connect to that peer has failed."""
        known = self._peers.get(peer)
        if known is not None:
            known.unreachable = printable(reason, MAX_WHY)

    def tick(self, now: float, wall: float) -> None:
        """Update the standing of peers, because time has passed."""
        for known in self._peers.values():
            age = now - known.heard_at
            if known.is_there and age > LIFE_SECONDS:
                self._lose(known, f"it has said nothing for {age:.0f} s", now, wall)
            elif known.standing is Standing.HERE and age > LATE_SECONDS:
                self._stand(known, Standing.SILENT, "", now)

    def _lose(self, known: SeenPeer, why: str, now: float, wall: float) -> None:
        self._stand(known, Standing.LOST, why, now)
        self._tell(wall, known.peer, f"was lost: {why}")

    @staticmethod
    def _stand(known: SeenPeer, standing: Standing, why: str, now: float) -> None:
        known.standing, known.why, known.since = standing, why, now

    def _tell(self, wall: float, peer: PeerID, what: str) -> None:
        self._happenings.append(Happening(wall, name_of(peer), what))

    def _forget_one(self) -> bool:
        """Make room for a new peer by forgetting one that is gone. Returns whether there was one."""
        gone = [known for known in self._peers.values() if not known.is_there]
        if not gone:
            return False
        peer = min(gone, key=lambda known: known.since).peer
        del self._peers[peer]
        self._named.pop(peer.key[:PREFIX_BYTES], None)
        return True

    def _name(self, key: bytes) -> str:
        """The name of a peer of which only the beginning of its key is known."""
        return name_of(self._named[key]) if key in self._named else key.hex()

    # -- what is known

    def expected(self) -> list[PeerID]:
        """The peers that are there and listen, to which this process should be connected."""
        return [k.peer for k in self._peers.values() if k.is_there and not k.is_client]

    def records(self) -> list[tuple[PeerID, Health]]:
        """The newest record of each peer that is there."""
        return [(known.peer, known.health) for known in self._peers.values() if known.is_there]

    def snapshot(self, now: float, wall: float) -> Snapshot:
        """A snapshot of the run."""
        here = [known for known in self._peers.values() if known.is_there]
        findings, alike = findings_of(self._peers.values(), now)
        epoch = max((known.health.epoch for known in here), default=0)
        best = max((known.health for known in here), key=lambda health: health.samples_behind, default=None)
        paces = [known.health.epoch_seconds for known in here if known.health.epoch_seconds > 0]
        pace = statistics.median(paces) if paces else 0.0
        speed, common = sum(known.health.samples_per_second for known in here), common_epoch(here)
        order = sorted(self._peers.values(), key=lambda known: (not known.is_there, name_of(known.peer)))
        views = tuple(view_of(known, findings.get(known.peer, []), speed, common, now) for known in order)
        told = [v for v, k in zip(views, order, strict=True) if k.is_there or is_told(k, now)]
        # A record of an earlier epoch is old: that epoch's round has begun.
        waits = max((known.left(known.health.waits, now) for known in here if known.health.epoch == epoch), default=0.0)
        is_well, sentence = sentence_of(
            self.run_id, told, epoch, pace, alike=alike, refused=refused_ones(here), waits=waits
        )
        phases = mean_of([view.phases for view in views if view.phases is not None and view.standing is Standing.HERE])
        sent = [known.health.last.sent for known in here if known.health.last is not None] or [0]
        return Snapshot(
            run_id=self.run_id,
            at=wall,
            is_well=is_well,
            sentence=sentence,
            epoch=epoch,
            samples_behind=0.0 if best is None else best.samples_behind,
            epoch_seconds=pace,
            loss=loss_of([known.health for known in here]),
            samples=max((known.health.all_samples for known in here if known.health.epoch == epoch), default=0.0),
            target=max((known.health.target for known in here), default=0.0),
            counted="inner steps" if best is not None and best.counts_steps else "samples",
            samples_per_second=speed,
            phases=phases,
            waits=waits,
            advice="" if phases is None or waits else advice_of(phases, statistics.fmean(sent), len(here)),
            peers=views,
            happenings=tuple(self._happenings),
        )
