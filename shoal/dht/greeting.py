"""How a node introduces itself to its initial peers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from shoal.dht.messages import Ping, Pong
from shoal.dht.protocol import Protocol
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr

GRACE = 1.0  # seconds that the other peers have after the first answer


async def greet(
    protocol: Protocol, initial_peers: Mapping[PeerID, Sequence[Multiaddr]], timeout: float
) -> dict[PeerID, str]:
    """Ping `initial_peers` at their addresses. Returns, for each peer that did not answer, the reason.

    Takes at most `timeout` seconds, and at most one second after the first answer.
    """

    async def ping(peer: PeerID) -> str:
        protocol.node.learn(peer, initial_peers[peer])
        try:
            await protocol.call(peer, Ping(protocol.sender()), Pong, timeout)
        except (P2PError, TimeoutError) as error:
            return str(error) or f"no answer within {timeout:g} s"
        return ""

    pings = {peer: protocol.node.spawn(ping(peer)) for peer in initial_peers}
    waiting = list(pings.values())
    try:
        while waiting and all(not task.done() or task.result() for task in pings.values()):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = [task for task in waiting if not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=GRACE)
    finally:
        for task in pings.values():
            task.cancel()
    for peer in [peer for peer, task in pings.items() if not task.done()]:
        protocol.block(peer)
    reasons = {peer: task.result() if task.done() else "no answer yet" for peer, task in pings.items()}
    return {peer: reason for peer, reason in reasons.items() if reason}
