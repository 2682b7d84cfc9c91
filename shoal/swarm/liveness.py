"""Notices that a peer hangs: its connections stay open, so its reactor is asked for an answer. Whatever arrives from a
peer is a sign of life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.movement import Movement
from shoal.swarm.channel import Channel
from shoal.swarm.protocol.messages import Pong
from shoal.swarm.protocol.peer import Peer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watch:
    """A peer that is waited for.

    Attributes:
        since: when it last gave a sign of life.
        movement: the bytes on the connection to it.
    """

    since: float
    movement: Movement


class Liveness:
    """Pings the peers that are waited for. A peer that gives no sign of life is disconnected, and so is lost.

    Args:
        channel: sends the pings.
        peer: the machine that hears the answers.
        timeout: seconds without a sign of life after which a peer counts as lost.
        act: performs what the machine has decided.
    """

    def __init__(self, channel: Channel, peer: Peer, timeout: float, act: Callable[[], None]) -> None:
        self._channel, self._peer, self._timeout, self._act = channel, peer, timeout, act
        self._asked: dict[bytes, None] = {}  # peers that owe an answer
        self._watches: dict[bytes, _Watch] = {}

    def forget(self) -> None:
        """This process stood still: what has arrived meanwhile was not read yet."""
        self._watches.clear()

    def look_after(self, keys: Iterable[bytes], now: float) -> None:
        """These peers are waited for; to be called every second."""
        waited_for = dict.fromkeys(key for key in keys if key != self._channel.node.peer_id.key)
        watched = {**waited_for, **self._asked}
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
            self._channel.spawn(self._ask(key))

    async def _ask(self, key: bytes) -> None:
        ping = self._peer.ping()
        try:
            pong = await self._channel.call(key, ping, Pong, self._timeout)
        except (P2PError, TimeoutError) as error:
            log.debug(
                "%r: %r: %s", self._channel.node.peer_id, PeerID(key), error
            )  # the node reports a lost connection
        else:
            self._peer.on_pong(key, ping, pong, asyncio.get_running_loop().time())
            self._act()
        finally:
            self._asked.pop(key, None)
