"""A peer as a picture of its run knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.health.record import Health, Mark
from shoal.monitor.snapshot import Standing
from shoal.p2p.identity import PeerID


@dataclass(slots=True)
class KnownPeer:
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
