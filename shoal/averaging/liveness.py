"""Sees that those on whom this peer waits are alive: a process that hangs keeps its connections, and ZeroMQ's thread
even answers heartbeats for it, so they are asked for an answer of their reactor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from shoal.averaging.channel import Channel
from shoal.averaging.messages import Ping, Pong
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

PING_SECONDS = 1.0


class Liveness:
    """Pings the peers that are waited for, each once a second at most.

    Args:
        channel: over which pings go.
        timeout: seconds without an answer after which a peer counts as lost.
        waited_for: the keys of the peers to ask now. One that does not answer is disconnected, and so lost.
        stood_still: called when this peer itself gave no answer for so long (the process was stopped, the machine
            asleep), so that the others may have lost it.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: float,
        waited_for: Callable[[], Iterable[bytes]],
        stood_still: Callable[[], None],
    ) -> None:
        self._channel, self._timeout = channel, timeout
        self._waited_for, self._stood_still = waited_for, stood_still
        self._asked: set[bytes] = set()

    async def run(self) -> None:
        """Until cancelled."""
        loop, me = asyncio.get_running_loop(), self._channel.node.peer_id
        while True:
            asleep = loop.time()
            await asyncio.sleep(PING_SECONDS)
            if loop.time() - asleep > PING_SECONDS + self._timeout:
                log.info("%r stood still for %.1f s", me, loop.time() - asleep)
                self._stood_still()
            for key in self._waited_for():
                if key != me.key and key not in self._asked:
                    self._asked.add(key)
                    self._channel.spawn(self._ask(PeerID(key)))

    async def _ask(self, peer: PeerID) -> None:
        node = self._channel.node
        try:
            await self._channel.call(peer.key, Ping(), Pong, self._timeout)
        except TimeoutError:
            log.info("%r: %r does not answer", node.peer_id, peer)
            node.disconnect(peer, "it does not answer")
        except P2PError as error:
            log.debug("%r: %r: %s", node.peer_id, peer, error)  # a lost connection is told by the node itself
        finally:
            self._asked.discard(peer.key)
