"""The in-memory network: given delays, cut links, killed peers."""

from __future__ import annotations

import asyncio

import pytest

from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.memory_transport import MemoryNetwork, MemoryTransport
from tests.p2p.recorder import LOOPBACK, Recorder


async def three(network: MemoryNetwork) -> list[Recorder]:
    """Three ends, each connected to each."""
    ends = [Recorder(MemoryTransport(network, Identity().peer_id)) for _ in range(3)]
    for end in ends:
        address = await end.transport.listen(LOOPBACK)
        for other in ends:
            if other is not end:
                await other.transport.dial(address)
    return ends


def test_messages_take_the_links_time_and_keep_their_order():
    async def main():
        network = MemoryNetwork(delay=lambda source, target, size: 0.05 if size > 100 else 0.0)
        one, other, _ = await three(network)
        started = asyncio.get_running_loop().time()
        one.transport.send([other.transport.peer_id], b"large", [bytes(1000)])
        one.transport.send([other.transport.peer_id], b"small")
        await other.until_messages(2)
        assert other.headers == [b"large", b"small"]
        assert asyncio.get_running_loop().time() - started >= 0.05

    asyncio.run(main())


def test_a_killed_peer_is_lost_to_all_after_what_it_sent():
    async def main():
        network = MemoryNetwork(delay=lambda *_: 0.01)
        one, other, dead = await three(network)
        dead.transport.send([one.transport.peer_id], b"last words")
        network.kill(dead.transport.peer_id)
        one.transport.send([dead.transport.peer_id], b"too late")
        dead.transport.send([other.transport.peer_id], b"from the grave")
        await asyncio.gather(*(end.until_lost(dead.transport.peer_id) for end in (one, other)))
        assert one.order == ["message", "lost"]
        assert other.order == ["lost"]
        assert dead.order == []
        with pytest.raises(PeerUnreachable):
            await one.transport.dial(LOOPBACK.with_port(1025 + 2).with_peer(dead.transport.peer_id))

    asyncio.run(main())


def test_a_cut_link_is_noticed_by_both_after_the_heartbeats_time():
    async def main():
        network = MemoryNetwork(lost_after=0.05)
        one, other, third = await three(network)
        network.cut(one.transport.peer_id, other.transport.peer_id)
        one.transport.send([other.transport.peer_id, third.transport.peer_id], b"to both")
        await asyncio.gather(one.until_lost(other.transport.peer_id), other.until_lost(one.transport.peer_id))
        assert other.headers == []
        assert third.headers == [b"to both"]
        assert third.lost == []
        assert not one.transport.is_connected(other.transport.peer_id)

    asyncio.run(main())


def test_a_link_that_heals_in_time_was_never_lost():
    async def main():
        network = MemoryNetwork(lost_after=0.03)
        one, other, _ = await three(network)
        network.cut(one.transport.peer_id, other.transport.peer_id)
        network.heal()
        await asyncio.sleep(0.05)
        one.transport.send([other.transport.peer_id], b"still here")
        await other.until_messages(1)
        assert one.lost == other.lost == []

    asyncio.run(main())
