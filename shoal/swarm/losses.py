"""Records which members this peer has lost, and which ones it has put out of rounds as their coordinator. The log and
the health record report them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.leading import Leading
from shoal.swarm.protocol.view import MAX_MEMBERS

log = logging.getLogger(__name__)

TOLD_SECONDS = 30.0  # a loss is reported for so long, which is as long as the lost member's own last record lives


@dataclass(frozen=True, slots=True)
class LostMember:
    """A member whose connection ended although it had not said that it leaves.

    Attributes:
        key: the key of the member.
        number: how many members this peer had lost before.
        coordinated: whether the member coordinated this peer's round, or was to call the next one.
    """

    key: bytes
    number: int
    coordinated: bool


@dataclass(frozen=True, slots=True)
class PutOut:
    """A member that this peer has put out of a round.

    Attributes:
        key: the key of the member.
        number: how many members this peer had put out before.
        reason: why this peer has put it out.
    """

    key: bytes
    number: int
    reason: str


class Losses:
    """Remembers lost members for TOLD_SECONDS, and the member that was put out last.

    Attributes:
        last_out: the member that was put out last; None before the first.
        news: set when a member was lost, and when this peer begins or ends to load the run's state. The reader that
            reports it clears it.
    """

    def __init__(self) -> None:
        self.last_out: PutOut | None = None
        self.news = asyncio.Event()
        self._lost: dict[bytes, tuple[LostMember, float]] = {}  # each with the time until which it is reported
        self._count = 0
        self._lead: Leading | None = None
        self._out: set[bytes] = set()  # put out of the round that `_lead` coordinates, and reported

    def add(self, key: bytes, *, coordinated: bool, connected: int, epoch: int, now: float) -> None:
        """A member was lost. `connected` is the number of connected members that are left, this peer included; `epoch`
        is the epoch of this peer."""
        peer = PeerID(key)
        fields: dict[str, object] = {"event": "lost", "peer": str(peer), "members": connected}
        log.info("%s is lost; members connected, with this peer: %d", peer, connected, extra={"shoal": fields})
        if coordinated:
            fields = {"event": "coordinator lost", "peer": str(peer), "epoch": epoch}
            log.info("the coordinator of epoch %d, %s, is lost", epoch, peer, extra={"shoal": fields})
        self._lost.pop(key, None)
        self._lost[key] = LostMember(key, self._count, coordinated), now + TOLD_SECONDS
        self._count += 1
        if len(self._lost) > MAX_MEMBERS:
            del self._lost[next(iter(self._lost))]
        self.news.set()

    def back(self, key: bytes) -> None:
        """A member has spoken, so it is not lost."""
        self._lost.pop(key, None)

    def told(self, most: int, now: float) -> list[LostMember]:
        """The members that were lost in the last TOLD_SECONDS; the last `most` of them."""
        while self._lost and next(iter(self._lost.values()))[1] <= now:
            del self._lost[next(iter(self._lost))]
        return [loss for loss, _ in self._lost.values()][-most:]

    def look(self, lead: Leading) -> None:
        """Record the members that this peer, as the coordinator of its round, has put out since the last call."""
        if lead is not self._lead:
            # A coordinator that has taken a round over did not itself put out the members that were out before.
            self._lead, self._out = lead, set(lead.out) if lead.took_over else set()
        epoch = lead.begin.tip.epoch
        for key in lead.out.keys() - self._out if len(lead.out) > len(self._out) else ():
            self._out.add(key)
            peer, reason, number = PeerID(key), lead.out[key], 0 if self.last_out is None else self.last_out.number + 1
            self.last_out = PutOut(key, number, reason)
            fields = {"event": "put out", "peer": str(peer), "reason": reason, "epoch": epoch}
            log.info("%s is put out of the round of epoch %d: %s", peer, epoch, reason, extra={"shoal": fields})
