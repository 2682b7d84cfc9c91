"""What a `Picture` knows of one peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.health.record import Health, Mark
from shoal.monitor.snapshot import Standing
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import Role

MAX_MARKS = 64  # of one peer


@dataclass(slots=True)
class SeenPeer:
    """One peer.

    Attributes:
        peer: its id.
        health: its newest record.
        before: the record before that, of the same start; None if there is none.
        heard_at: when the newest record was published, as far as is known.
        read_at: when the newest record was first read.
        first_at: when the first record was read.
        standing: see `Standing`.
        why: why it was lost.
        since: when its standing last changed.
        clock: by how many seconds, at least, its clock is ahead of this machine's (behind it if negative). It is the
            smaller difference of the last two records, since one of them may have arrived late.
        clock_before: the difference of the last record.
        unreachable: why this process can't connect to it; "" if it is connected, or no attempt was made.
        marks: its marks, by epoch.
        losses: the losses that it reports, as (beginning of the key, number of the loss), and when each was first read.
    """

    peer: PeerID
    health: Health
    heard_at: float
    read_at: float
    first_at: float
    since: float
    before: Health | None = None
    standing: Standing = Standing.HERE
    why: str = ""
    clock: float = 0.0
    clock_before: float = 0.0
    unreachable: str = ""
    marks: dict[int, Mark] = field(default_factory=dict)
    losses: dict[tuple[bytes, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hear(self.health, self.read_at)

    def heard(self, health: Health, heard_at: float, clock: float, now: float) -> None:
        """A newer record was read. `clock` is the difference of clocks that it shows."""
        self.clock, self.clock_before = min(self.clock_before, clock, key=abs), clock
        self.before, self.health = None if health.started != self.health.started else self.health, health
        self.heard_at, self.read_at = max(self.heard_at, heard_at), now
        if self.before is None:
            self.marks, self.losses = {}, {}
        self._hear(health, now)

    def _hear(self, health: Health, now: float) -> None:
        self.marks |= {mark.epoch: mark for mark in health.marks}
        for epoch in sorted(self.marks)[:-MAX_MARKS]:
            del self.marks[epoch]
        said = [(loss.key, loss.number) for loss in health.lost]
        self.losses = {loss: self.losses.get(loss, now) for loss in said}

    @property
    def is_there(self) -> bool:
        return self.standing in (Standing.HERE, Standing.SILENT)

    def left(self, seconds: float, now: float) -> float:
        """How many of the seconds that its newest record names are left."""
        return max(0.0, seconds - (now - self.heard_at))

    @property
    def is_client(self) -> bool:
        return self.health.role is Role.CLIENT
