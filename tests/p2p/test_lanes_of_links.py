"""Named buffers of a transport over sockets: how their lanes begin, and how they end with their links."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import Any

import pytest

from shoal.p2p import congestion, lanes
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import MAX_CONNECTIONS, Lane
from shoal.p2p.sealing import NAME_BYTES
from shoal.p2p.sockets import LANE_BYTES, LINGER
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets

MIB = 1 << 20


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


def send(end: Recorder, to: Recorder, number: int, data: bytes | bytearray) -> None:
    end.transport.send([to.transport.peer_id], b"%d" % number, [data], name(number))


def lane_of(end: Recorder, other: Recorder) -> Any:
    return end.transport._lanes.beside.get(end.transport._peers[other.transport.peer_id])


async def joined(one: Recorder, other: Recorder) -> None:
    """Connected, with a lane."""
    await one.transport.dial(await other.transport.listen(LOOPBACK))
    send(one, other, 0, bytes(LANE_BYTES))
    await other.until_messages(1)


@pytest.mark.parametrize("listener_begins", [False, True])
def test_large_named_buffers_pass_over_a_lane_into_their_targets(listener_begins):
    async def main() -> None:
        async with sockets(None, None) as ends:
            one, other = ends
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            sender, receiver = reversed(ends) if listener_begins else ends
            memory = [bytearray(LANE_BYTES), bytearray(LANE_BYTES - 1)]
            targets = [
                receiver.transport.leases.register(name(n), sender.transport.peer_id, memoryview(memory[n]))
                for n in range(2)
            ]
            data = [os.urandom(len(target)) for target in memory]
            for number in range(2):
                send(sender, receiver, number, data[number])
            send(sender, receiver, 2, data[0])
            await receiver.until_messages(3)
            assert {int(header): buffers for _, header, buffers in receiver.messages} == {
                n: [content] for n, content in enumerate([*data, data[0]])
            }
            assert [target.filled for target in targets] == [True, False]  # the other one was not worth a lane
            assert memory[0] == data[0]
            assert sender.transport.moved(receiver.transport.peer_id) >= 2 * LANE_BYTES

    asyncio.run(main())


def test_what_was_cancelled_before_there_was_a_lane_does_not_come():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            send(one, other, 1, bytes(LANE_BYTES))
            send(one, other, 2, bytes(LANE_BYTES))
            one.transport.cancel(name(1))
            await other.until_messages(1)
            send(one, other, 3, bytes(LANE_BYTES))
            await other.until_messages(2)
            assert other.headers == [b"2", b"3"]

    asyncio.run(main())


def test_who_closes_has_sent_what_was_queued_and_is_lost_after_it():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            for number in range(20):
                send(one, other, number, bytes(MIB))
            await one.transport.close()
            await other.until_lost(one.transport.peer_id)
            assert other.order == ["message"] * 21 + ["lost"]

    asyncio.run(main())


def test_who_closes_lets_a_lane_leave_that_came_after_all_others_had_gone():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            one.transport.disconnect(other.transport.peer_id)
            await eventually(lambda: not one.transport._lanes.beside and other.lost)
            await joined(one, other)
            await other.until_messages(2)
            for number in range(20):
                send(one, other, number, bytes(MIB))
            await one.transport.close()
            await other.until(lambda: len(other.lost) == 2)
            assert len(other.messages) == 22

    asyncio.run(main())


def test_a_lane_that_ends_alone_ends_the_link_on_both_sides():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            lane_of(one, other)._connections[0].shut()
            reasons = [await end.until_lost(far.transport.peer_id) for end, far in ((one, other), (other, one))]
            assert any("its lane was lost" in reason for reason in reasons)  # who is second sees the link's end first
            await one.transport.dial(other.transport._listeners and await other.transport.listen(LOOPBACK))
            send(one, other, 1, bytes(LANE_BYTES))
            await other.until_messages(2)

    asyncio.run(main())


def test_a_peer_that_was_disconnected_is_not_reported_and_leaves_no_lane():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            lane = lane_of(one, other)
            one.transport.disconnect(other.transport.peer_id)
            await other.until_lost(one.transport.peer_id)
            await eventually(lambda: not one.transport._lanes.beside and not other.transport._lanes.beside)
            assert lane.over.is_set()
            assert not one.lost

    asyncio.run(main())


def test_one_that_is_about_to_be_reported_lost_is_not_when_it_is_disconnected(monkeypatch):
    monkeypatch.setattr("shoal.p2p.sockets.LANE_LINGER", 0.2)

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            lane = lane_of(one, other)
            one.transport._peers[other.transport.peer_id].end("the link alone ends")
            await eventually(lambda: other.transport.peer_id in one.transport._leaving)
            one.transport.disconnect(other.transport.peer_id)
            assert lane.over.is_set()
            await asyncio.sleep(0.3)
            assert not one.lost

    asyncio.run(main())


def test_a_link_whose_lane_hangs_is_lost_all_the_same(monkeypatch):
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            theirs = lane_of(other, one)
            monkeypatch.setattr(other.transport, "_lose", lambda *_: None)  # it keeps its end of the lane
            one.transport._peers[other.transport.peer_id].end("the link alone ends")
            await one.until_lost(other.transport.peer_id, timeout=5.0)
            theirs.end()

    asyncio.run(main())


def test_a_token_is_good_once_and_not_for_long_and_a_wrong_one_never(monkeypatch):
    tokens: list[bytes] = []
    dial = Lane.dial

    def noting(self: Any, address: Any, token: bytes, keys: Any) -> None:
        tokens.append(token)
        dial(self, address, token, keys)

    monkeypatch.setattr(Lane, "dial", noting)

    async def is_closed(address: Any, token: bytes) -> bool:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(token)
        try:
            return await asyncio.wait_for(reader.read(), 10.0) == b""
        except ConnectionResetError:
            return True
        finally:
            writer.close()

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            address = await other.transport.listen(LOOPBACK)
            assert await is_closed(address, tokens[0])
            assert await is_closed(address, b"\0" + os.urandom(31))
            monkeypatch.setattr(lanes, "TOKEN_SECONDS", 0.01)
            monkeypatch.setattr(Lane, "dial", lambda self, address, token, keys: tokens.append(token))
            lane_of(one, other).offer()
            await eventually(lambda: len(tokens) == 2)
            await eventually(lambda: not other.transport._lanes._tokens)
            assert await is_closed(address, tokens[1])
            send(one, other, 1, bytes(LANE_BYTES))
            await other.until_messages(2)

    asyncio.run(main())


def test_a_lane_has_four_connections_and_not_more():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            lane = lane_of(one, other)
            for _ in range(MAX_CONNECTIONS):
                lane.offer()
            await eventually(lambda: lane._used == MAX_CONNECTIONS + 1)
            assert lane.connections <= MAX_CONNECTIONS
            for _ in range(lanes.MAX_KEYS - MAX_CONNECTIONS):
                lane.offer()
            await other.until_lost(one.transport.peer_id)

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_lane_has_one_connection_until_a_chunk_has_passed(at_once):
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            await eventually(lambda: other.transport.is_connected(one.transport.peer_id))
            one.transport._lanes.of(one.transport._peers[other.transport.peer_id])
            await eventually(lambda: at_once or other.transport._lanes.connections)
            for _ in range(MAX_CONNECTIONS - 1):
                lane_of(one, other).offer()
            await eventually(lambda: other.transport._lanes.connections)
            await asyncio.sleep(0.2)
            assert other.transport._lanes.connections == 1
            number = 0
            while number < 2 or not (at_once or other.transport._lanes.connections == MAX_CONNECTIONS):
                send(other, one, number, bytes(LANE_BYTES))  # either way; the next one finds that it has passed
                number += 1
                await one.until_messages(number)

    asyncio.run(main())


def test_connections_of_lanes_are_bounded_in_all(monkeypatch):
    monkeypatch.setattr(lanes, "MAX_OF_ALL", 1)

    async def main() -> None:
        async with sockets(None, None, None) as (one, other, third):
            await joined(one, other)
            await third.transport.dial(await other.transport.listen(LOOPBACK))
            send(third, other, 0, bytes(LANE_BYTES))
            assert "connections of lanes already" in await other.until_lost(third.transport.peer_id)
            send(one, other, 1, bytes(LANE_BYTES))
            await other.until_messages(2)
            assert not one.lost

    asyncio.run(main())


@pytest.mark.parametrize("fails", [1, 1000])
def test_a_connection_that_does_not_open_is_tried_again_a_few_times(monkeypatch, fails):
    monkeypatch.setattr(lanes, "AGAIN_SECONDS", 0.01)

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            came, tried = other.transport.token_came, 0

            def token_came(link: Any, token: bytes) -> None:
                nonlocal tried
                tried += 1
                came(link, token if tried > fails else bytes(32))

            other.transport.token_came = token_came
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            send(one, other, 0, bytes(LANE_BYTES))
            if fails == 1:
                await other.until_messages(1)
                assert not one.lost
            else:
                assert "its lane was lost: " in await one.until_lost(other.transport.peer_id)
                assert tried == lanes.MAX_KEYS - MAX_CONNECTIONS + 1

    asyncio.run(main())


def test_a_lane_waits_for_a_listener_that_stands_still(monkeypatch):
    monkeypatch.setattr("shoal.p2p.lane.PATIENCE", 0.1)

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            came, tried = other.transport.token_came, []

            def token_came(link: Any, token: bytes) -> None:
                tried.append(token)
                time.sleep(0.5)
                came(link, token)

            other.transport.token_came = token_came
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            send(one, other, 0, bytes(LANE_BYTES))
            await other.until_messages(1)
            assert len(tried) == 1

    asyncio.run(main())


def test_who_has_a_token_need_not_wait_for_strangers(monkeypatch):
    monkeypatch.setattr("shoal.p2p.listener.HANDSHAKES_PER_ADDRESS", 3)

    async def main() -> None:
        async with sockets(None, None, None) as (one, other, third):
            address = await other.transport.listen(LOOPBACK)
            await one.transport.dial(address)
            strangers = [socket.create_connection((address.host, address.port)) for _ in range(5)]
            await eventually(lambda: len(other.transport._links) == 4)
            with pytest.raises(PeerUnreachable):
                await third.transport.dial(address)
            send(one, other, 0, bytes(LANE_BYTES))
            await other.until_messages(1)
            for stranger in strangers:
                stranger.close()
            assert not one.lost

    asyncio.run(main())


def test_a_long_path_without_bbr_gets_several_connections(monkeypatch):
    monkeypatch.setattr(congestion, "SHORT_SECONDS", 0)
    monkeypatch.setattr(congestion, "has_bbr", lambda: False)

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            await eventually(lambda: len(lane_of(other, one)._connections) == MAX_CONNECTIONS)
            for number in range(50):
                send(one, other, number, bytes([number]) * MIB)
            await other.until_messages(51)
            for _, header, (buffer,) in other.messages[1:]:
                assert buffer == bytes([int(header)]) * MIB

    asyncio.run(main())


def test_the_loop_goes_on_while_a_lane_ends(monkeypatch):
    goes_on = threading.Event()
    ended = Lane.ended

    def slowly(*arguments: Any) -> None:
        assert goes_on.wait(30)
        ended(*arguments)

    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            monkeypatch.setattr(Lane, "ended", slowly)
            closing = asyncio.gather(one.transport.close(), other.transport.close())
            await asyncio.sleep(LINGER + 0.3)
            assert not closing.done()
            goes_on.set()
            await asyncio.wait_for(closing, 10)

    asyncio.run(main())


def test_nothing_is_left_of_a_transport_with_lanes():
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with sockets(None, None, None) as (one, two, three):
            await joined(one, two)
            await joined(three, one)
            stranger = socket.create_connection(("127.0.0.1", one.transport._listeners[0].port))
            stranger.sendall(b"\0")  # the beginning of a token
            for number in range(10):
                send(one, two, number, bytes(4 * MIB))
                send(one, three, number, bytes(4 * MIB))
            await asyncio.sleep(0)
            stranger.close()

    asyncio.run(main())
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_one_who_is_lost_is_reported_before_it_is_connected_again():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await joined(one, other)
            peer: PeerID = one.transport.peer_id
            one.transport._peers[other.transport.peer_id].end("it was cut")
            await one.until_lost(other.transport.peer_id)
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            one.transport.send([other.transport.peer_id], b"after", ())
            await other.until(lambda: b"after" in other.headers)
            assert [who for who, _ in other.lost] == [peer]
            assert other.order == ["message", "lost", "message"]

    asyncio.run(main())
