"""What both transports promise: the same tests over real sockets and over the in-memory network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shoal.p2p.errors import HandshakeFailed, MessageTooLarge, PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.memory_transport import MemoryNetwork, MemoryTransport
from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES, Observation
from tests.p2p.recorder import LOOPBACK, Recorder, sockets

Scenario = Callable[[Recorder, Recorder], Awaitable[None]]


@pytest.fixture(params=["sockets", "memory"])
def pair(request):
    """Runs a scenario with two ends that are not connected yet."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            if request.param == "sockets":
                async with sockets(None, None) as (one, other):
                    await scenario(one, other)
            else:
                network = MemoryNetwork()
                one, other = (Recorder(MemoryTransport(network, Identity().peer_id)) for _ in range(2))
                await scenario(one, other)
                await one.transport.close()
                await other.transport.close()

        asyncio.run(main())

    return run


async def connect(dialler: Recorder, listener: Recorder) -> None:
    await dialler.transport.dial(await listener.transport.listen(LOOPBACK))


def test_listening_tells_the_port_and_the_peer(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        address = await one.transport.listen(LOOPBACK)
        assert address.port > 0
        assert address.peer_id == one.transport.peer_id
        with pytest.raises(OSError, match=str(address.port)):
            await other.transport.listen(LOOPBACK.with_port(address.port))

    pair(scenario)


def test_messages_pass_both_ways_in_order_and_whole(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        await connect(one, other)
        assert one.transport.is_connected(other.transport.peer_id)
        for number in range(200):
            one.transport.send([other.transport.peer_id], b"%d" % number, [bytes([number]) * number] * (number % 5))
        await other.until_messages(200)
        expected = [(one.transport.peer_id, b"%d" % n, [bytes([n]) * n] * (n % 5)) for n in range(200)]
        assert other.messages == expected
        other.transport.send([one.transport.peer_id], b"back")
        await one.until_messages(1)
        assert one.messages == [(other.transport.peer_id, b"back", [])]

    pair(scenario)


def test_a_buffer_may_be_written_again_when_send_has_returned(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        await connect(one, other)
        header, buffer = bytearray(b"header"), bytearray(MAX_BUFFER_BYTES)
        for byte in range(4):
            buffer[:] = bytes([byte]) * len(buffer)
            one.transport.send([other.transport.peer_id], header, [memoryview(buffer)])
            header[:], buffer[:] = b"?" * 6, b"?" * len(buffer)
            header[:] = b"header"
        await other.until_messages(4)
        assert [(h, b[0] == bytes([n]) * MAX_BUFFER_BYTES) for n, (_, h, b) in enumerate(other.messages)] == [
            (b"header", True)
        ] * 4

    pair(scenario)


def test_a_message_over_the_bounds_is_not_sent(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        await connect(one, other)
        peers = [other.transport.peer_id]
        with pytest.raises(MessageTooLarge, match="header"):
            one.transport.send(peers, bytes(MAX_HEADER_BYTES + 1))
        with pytest.raises(MessageTooLarge, match="buffers"):
            one.transport.send(peers, b"", [b""] * (MAX_BUFFERS + 1))
        with pytest.raises(MessageTooLarge, match="a buffer of"):
            one.transport.send(peers, b"", [bytes(MAX_BUFFER_BYTES + 1)])
        largest = (bytes(MAX_HEADER_BYTES), [bytes(MAX_BUFFER_BYTES)] * MAX_BUFFERS)
        one.transport.send(peers, *largest)
        await other.until_messages(1)
        assert other.messages == [(one.transport.peer_id, *largest)]

    pair(scenario)


def test_a_deliberate_end_is_reported_to_the_other_side_only(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        await connect(one, other)
        other.transport.disconnect(one.transport.peer_id)
        assert not other.transport.is_connected(one.transport.peer_id)
        await one.until_lost(other.transport.peer_id)
        assert not one.transport.is_connected(other.transport.peer_id)
        one.transport.send([other.transport.peer_id], b"to nobody")
        assert (len(one.lost), other.lost, other.messages) == (1, [], [])
        # and the other way, over a new connection
        await connect(one, other)
        one.transport.disconnect(other.transport.peer_id)
        await other.until_lost(one.transport.peer_id)
        assert (len(one.lost), len(other.lost)) == (1, 1)

    pair(scenario)


def test_closing_lets_the_last_words_pass(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        await connect(one, other)
        for number in range(20):
            one.transport.send([other.transport.peer_id], b"%d" % number, [bytes(1 << 20)])
        await one.transport.close()
        await other.until_lost(one.transport.peer_id)
        assert other.headers == [b"%d" % number for number in range(20)]
        assert other.order == ["message"] * 20 + ["lost"]
        assert one.lost == []

    pair(scenario)


def test_dialling_a_connected_peer_returns_at_once(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        address = await other.transport.listen(LOOPBACK)
        await one.transport.dial(address)
        await one.transport.dial(address)
        await one.transport.dial(address.with_port(1))
        one.transport.send([other.transport.peer_id], b"once")
        await other.until_messages(1)
        assert other.headers == [b"once"]

    pair(scenario)


def test_nobody_and_somebody_else_are_told_apart(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        address = await other.transport.listen(LOOPBACK)
        stranger = Identity().peer_id
        with pytest.raises(HandshakeFailed):
            await asyncio.wait_for(one.transport.dial(address.with_peer(stranger)), 60)
        with pytest.raises(PeerUnreachable) as caught:
            await asyncio.wait_for(one.transport.dial(address.with_port(9)), 60)
        assert not isinstance(caught.value, HandshakeFailed)
        with pytest.raises(ValueError, match="/p2p/<peer id>"):
            await one.transport.dial(LOOPBACK.with_port(address.port))
        await one.transport.dial(address)
        assert one.lost == other.lost == []

    pair(scenario)


def test_a_connection_of_its_own_tells_from_where_it_comes_and_leaves_the_other_alone(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        address = await other.transport.listen(LOOPBACK)
        assert one.transport.source(other.transport.peer_id) == ""
        await one.transport.observe(address)
        assert not one.transport.is_connected(other.transport.peer_id)
        await one.transport.dial(address)
        assert other.transport.source(one.transport.peer_id) == "127.0.0.1"
        for _ in range(3):
            seen = await one.transport.observe(address)
            assert (seen.host, seen.port) == ("127.0.0.1", seen.source_port)
        assert one.transport.is_connected(other.transport.peer_id)
        assert other.transport.is_connected(one.transport.peer_id)
        with pytest.raises(HandshakeFailed):
            await one.transport.observe(address.with_peer(Identity().peer_id))
        assert not one.lost
        assert not other.lost

    pair(scenario)


def test_asking_while_others_connect_is_no_link_whose_place_another_takes(pair):
    async def scenario(one: Recorder, other: Recorder) -> None:
        address = await other.transport.listen(LOOPBACK)
        asked: list[asyncio.Task[Observation]] = []
        dial = asyncio.create_task(one.transport.dial(address))
        while not dial.done() and len(asked) < 100:
            asked.append(asyncio.create_task(one.transport.observe(address)))
            await asyncio.sleep(0)
        await dial
        assert len({seen.host for seen in await asyncio.gather(*asked)}) == 1
        assert one.transport.is_connected(other.transport.peer_id)

    pair(scenario)
