"""Sees that those on whom this peer waits are alive: a process that hangs keeps its connections, so it is asked for an
answer of its reactor. Whatever comes from a peer is a sign of life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.movement import Movement
from shoal.swarm.channel import Channel
from shoal.swarm.protocol.messages import Ping, Pong

log = logging.getLogger(__name__)

PING_SECONDS = 1.0


@dataclass(slots=True)
class _Watch:
    """One peer that is waited for: since when it has given no sign of life."""

    since: float
    movement: Movement


class Liveness:
    """Pings the peers that are waited for, each once a second at most. One that gives no sign of life is disconnected,
    and so lost.

    Args:
        channel: over which pings go.
        timeout: seconds without a sign of life after which a peer counts as lost.
        waited_for: the keys of the peers to ask now.
        ping: what to ask.
        answered: called with a peer's key, what it was asked, and what it answered.
        stood_still: called when this peer itself gave no answer for so long (the process was stopped, the machine
            asleep), so that the others may have lost it.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: float,
        waited_for: Callable[[], Iterable[bytes]],
        ping: Callable[[], Ping],
        answered: Callable[[bytes, Ping, Pong], None],
        stood_still: Callable[[], None],
    ) -> None:
        self._channel, self._timeout = channel, timeout
        self._waited_for, self._ping, self._answered = waited_for, ping, answered
        self._stood_still = stood_still
        self._asked: dict[bytes, None] = {}
        self._watches: dict[bytes, _Watch] = {}

    async def run(self) -> None:
        """Until cancelled."""
        loop, me = asyncio.get_running_loop(), self._channel.node.peer_id
        while True:
            asleep = loop.time()
            await asyncio.sleep(PING_SECONDS)
            now = loop.time()
            if now - asleep > 2 * PING_SECONDS:
                self._watches.clear()  # what has come meanwhile was not read yet
            if now - asleep > PING_SECONDS + self._timeout:
                log.info("%r stood still for %.1f s", me, now - asleep)
                self._stood_still()
            waited_for = {key: None for key in self._waited_for() if key != me.key}
            # Who was asked owes an answer, even if it is not waited for at this moment.
            watched = {**waited_for, **dict.fromkeys(self._asked)}
            self._watches = {key: watch for key, watch in self._watches.items() if key in watched}
            for key in watched:
                self._look_after(key, now, asks=key in waited_for)

    def _look_after(self, key: bytes, now: float, *, asks: bool) -> None:
        node, peer = self._channel.node, PeerID(key)
        moved = node.transport.moved(peer)
        watch = self._watches.setdefault(key, _Watch(now, Movement(moved)))
        if watch.movement.goes_on(moved):
            watch.since = now
        watch.since = max(watch.since, node.heard(peer))
        if now - watch.since > self._timeout:
            log.info("%r: %r does not answer", node.peer_id, peer)
            del self._watches[key]
            node.disconnect(peer, f"it has given no sign of life for {self._timeout:g} s")
        elif asks and key not in self._asked:
            self._asked[key] = None
            self._channel.spawn(self._ask(peer))

    async def _ask(self, peer: PeerID) -> None:
        ping = self._ping()
        try:
            pong = await self._channel.call(peer.key, ping, Pong, self._timeout)
        except (P2PError, TimeoutError) as error:
            log.debug("%r: %r: %s", self._channel.node.peer_id, peer, error)  # a lost connection is told by the node
        else:
            self._answered(peer.key, ping, pong)
        finally:
            self._asked.pop(peer.key, None)
