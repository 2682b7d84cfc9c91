"""What strangers may send to the port, and listeners to a dialler: refused, and of no effect on anybody else."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq
import zmq.asyncio

import shoal.p2p.router
from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.greeting import MAGIC, VERSION, Hello
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets

encode = msgspec.msgpack.encode


@pytest.fixture(autouse=True)
def no_errors(caplog):
    """Strangers cause no error of ours: neither a logged one nor one that reaches the loop (which logs it)."""
    caplog.set_level(logging.INFO)
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr("shoal.p2p.sockets.REFUSAL_TIME", 0.1)


@asynccontextmanager
async def listener_and_friend() -> AsyncIterator[tuple[Recorder, Recorder, Multiaddr]]:
    """A listener, and a well-behaved peer connected to it that afterwards still is, and still is heard."""
    async with sockets(None, None) as (listener, friend):
        address = await listener.transport.listen(LOOPBACK)
        await friend.transport.dial(address)
        yield listener, friend, address
        friend.transport.send([listener.transport.peer_id], b"unharmed")
        await listener.until(lambda: b"unharmed" in listener.headers)
        assert friend.transport.peer_id not in [peer for peer, _ in listener.lost]
        assert friend.lost == []


@asynccontextmanager
async def stranger(address: Multiaddr, identity: Identity) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare DEALER with the keys of `identity`, connected to `address`."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_publickey, dealer.curve_secretkey = identity.curve_keys()
    assert address.peer_id is not None
    dealer.curve_serverkey = address.peer_id.curve_key()
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    dealer.connect(f"tcp://{address.host}:{address.port}")
    try:
        async with asyncio.timeout(60):
            yield dealer
    finally:
        dealer.close()
        context.term()


def hello(identity: Identity, magic: str = MAGIC, version: int = VERSION) -> bytes:
    return encode(Hello(magic, version, identity.peer_id.key, bytes(8)))


def connections(end: Recorder) -> int:
    return len(end.transport._listener._by_fd)


def test_bytes_that_are_not_zeromq():
    async def main():
        async with listener_and_friend() as (listener, _, address):
            for length in (0, 1, 10, 64, 1000, 100_000):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(os.urandom(length))
                with suppress(OSError):
                    writer.write_eof()
                    async with asyncio.timeout(60):
                        while await reader.read(1 << 16):
                            pass
                writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


def test_zeromq_without_encryption():
    async def main():
        async with listener_and_friend() as (listener, _, address):
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.connect(f"tcp://{address.host}:{address.port}")
                dealer.send(b"hello")
                await asyncio.sleep(0.1)
                assert listener.messages == []

    asyncio.run(main())


def test_encryption_for_another_server_key():
    async def main():
        async with listener_and_friend() as (listener, _, address):
            async with stranger(address.with_peer(Identity().peer_id), Identity()) as dealer:
                await dealer.send(b"hello")
                await asyncio.sleep(0.1)
            assert listener.messages == []

    asyncio.run(main())


IMPOSTOR = Identity()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "not a hello"),
        ([b"garbage"], "not a hello"),
        ([b"\xc1" * 1000], "not a hello"),
        ([b"\x91" * 100_000], "not a hello"),
        ([encode([0, MAGIC, VERSION, b"short", bytes(8)])], "not a hello"),
        ([encode([7, "what"])], "not a hello"),
        ([encode([1, "I refuse first"])], "refused: I refuse first"),
        ([hello(IMPOSTOR), b"and more"], "a hello is one frame, not 2"),
        ([b""] * 1000, "a hello is one frame, not 1000"),
        ([hello(IMPOSTOR, version=2)], "version 2, this peer 'shoal' version 1"),
        ([hello(IMPOSTOR, magic="shallow")], "it speaks 'shallow'"),
        ([hello(Identity())], "the key of this connection is not that of"),
        ([encode([0, MAGIC, VERSION, b"\xff" * 32, bytes(8)])], "the key of this connection is not that of"),
        ([encode(["notice", "dht", 0, 0.0, {}])], "not a hello"),
    ],
)
def test_a_first_message_that_is_no_hello_is_refused_with_the_reason(frames, reason):
    async def main():
        async with listener_and_friend() as (listener, _, address):
            async with stranger(address, IMPOSTOR) as dealer:
                await dealer.send_multipart(frames)
                answer = msgspec.msgpack.decode(await dealer.recv())
                await dealer.send_multipart([b"a message", b"a buffer"])
                await dealer.send(hello(IMPOSTOR))
                assert answer[0] == 1
                assert reason in answer[1]
                await eventually(lambda: connections(listener) == 1)
            assert listener.messages == []
            assert not listener.transport.is_connected(IMPOSTOR.peer_id)
            assert listener.lost == []

    asyncio.run(main())


def test_messages_sent_before_the_hello_was_answered():
    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address, IMPOSTOR) as dealer:
            for frames in ([hello(IMPOSTOR)], [b"message"], [b"message"]):
                await dealer.send_multipart(frames)
            answer = msgspec.msgpack.decode(await dealer.recv())
            # Whether the loop had looked at the hello in between is chance; nothing unproven is heard either way.
            if answer[0] == 1:
                assert answer[1] == "a message came before the hello was answered"
                assert listener.messages == []
            else:  # or ZeroMQ ends the connection, whose dealer does not keep to the order
                lost = [IMPOSTOR.peer_id]
                await listener.until(lambda: len(listener.messages) == 2 or [who for who, _ in listener.lost] == lost)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"header"] + [b""] * (MAX_BUFFERS + 1), "buffers in one message exceed"),
        ([b"header"] + [b""] * 10_000, "buffers in one message exceed"),
        ([bytes(MAX_HEADER_BYTES + 1)], "a header of"),
        ([b"header", bytes(MAX_BUFFER_BYTES + 1)], "a buffer of"),
        ([b"header", bytes(2 * MAX_BUFFER_BYTES)], "connection was lost"),  # ZeroMQ itself does not take it
    ],
)
def test_a_message_over_its_bound_ends_the_connection_of_who_sent_it(frames, reason):
    async def main():
        async with listener_and_friend() as (listener, _, address):
            async with stranger(address, IMPOSTOR) as dealer:
                await dealer.send(hello(IMPOSTOR))
                await dealer.recv()
                await dealer.send(b"a good one")
                await dealer.send_multipart(frames)
                await dealer.send(b"another one")
                assert reason in await listener.until_lost(IMPOSTOR.peer_id)
            assert listener.headers == [b"a good one"]
            assert not listener.transport.is_connected(IMPOSTOR.peer_id)
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


def test_more_connections_than_allowed(monkeypatch):
    monkeypatch.setattr(shoal.p2p.router, "MAX_CONNECTIONS", 4)

    async def main():
        async with listener_and_friend() as (listener, _, address):
            streams = [await asyncio.open_connection(address.host, address.port) for _ in range(10)]
            await eventually(lambda: connections(listener) == 4)
            for _, writer in streams:
                writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        ([b"garbage"], HandshakeFailed, "not a hello"),
        ([b""] * 100, HandshakeFailed, "one frame, not 100"),
        ([hello(Identity())], HandshakeFailed, "names another peer"),
        ([hello(Identity(), version=9)], HandshakeFailed, "version 9"),
        ([encode([1, "go away"])], HandshakeFailed, "it refused: go away"),
        ([bytes(2 * MAX_BUFFER_BYTES)], PeerUnreachable, "connection was lost"),
    ],
)
def test_a_listener_that_answers_a_hello_with_something_else(answer, error, reason):
    async def main():
        identity = Identity()
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = identity.curve_keys()[1]
        port = router.bind_to_random_port("tcp://127.0.0.1")
        try:
            async with listener_and_friend() as (_, friend, _), asyncio.timeout(60):
                dial = asyncio.create_task(friend.transport.dial(LOOPBACK.with_port(port).with_peer(identity.peer_id)))
                routing_id, _ = await router.recv_multipart()
                await router.send_multipart([routing_id, *answer])
                await router.send_multipart([routing_id, b"message"])
                with pytest.raises(error, match=reason):
                    await dial
                assert friend.messages == []
                assert not friend.transport.is_connected(identity.peer_id)
        finally:
            router.close()
            context.term()

    asyncio.run(main())
