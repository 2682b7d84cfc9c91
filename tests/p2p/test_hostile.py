"""What strangers may send to the port, and listeners to a dialler: refused, and of no effect on anybody else."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import shoal.p2p.budget
import shoal.p2p.link
import shoal.p2p.listener
import shoal.p2p.shared
import shoal.p2p.sockets
from shoal.p2p import frames, greeting, tls
from shoal.p2p.errors import HandshakeFailed
from shoal.p2p.frames import FrameKind
from shoal.p2p.greeting import MAGIC, VERSION, Challenge, LinkHello, LinkKept
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.link import UNPROVEN_BYTES, Link
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets

encode = msgspec.msgpack.encode


@pytest.fixture(autouse=True)
def no_errors(caplog):
    """Strangers cause no error of ours: neither a logged one nor one that reaches the loop (which logs it)."""
    caplog.set_level(logging.INFO)
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr("shoal.p2p.link.REFUSAL_TIME", 0.1)


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


class Stranger:
    """A bare TLS connection to a listener, whose end is closed with it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: Identity) -> None:
        self.reader, self.writer, self.identity = reader, writer, identity
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.listener = tls.peer_of(certificate)
        self.certificate = certificate

    async def hear(self) -> Any:
        """What the listener's transport says next."""
        head = await self.reader.readexactly(24)
        assert head[0] == FrameKind.CONTROL
        return greeting.decode(memoryview(await self.reader.readexactly(int.from_bytes(head[4:8]))))

    async def write(self, data: bytes) -> None:
        """Send it, if the other side still takes it."""
        with suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def say(self, *said: bytes) -> None:
        for payload in said:
            await self.write(frames.encode(FrameKind.CONTROL, payload))

    def hello(self, nonce: bytes, **changed: object) -> bytes:
        """A good hello, but for what is changed."""
        assert self.listener is not None
        me, instance = self.identity.peer_id, bytes(8)
        signed = greeting.signed(me, self.listener, instance, nonce, self.certificate)
        fields = {"magic": MAGIC, "version": VERSION, "instance": instance, "peer": me.key}
        return encode(LinkHello(**(fields | {"signature": self.identity.sign(signed)} | changed)))

    async def is_over(self) -> bool:
        """Wait for the end."""
        with suppress(OSError):
            while await self.reader.read(1 << 16):
                pass
        return True

    def stop_reading(self) -> None:
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def join(self) -> None:
        """Be kept."""
        challenge = await self.hear()
        assert isinstance(challenge, Challenge)
        await self.say(self.hello(challenge.nonce))
        assert isinstance(await self.hear(), LinkKept)
        await self.say(encode(LinkKept()))  # if the listener waits for it


@asynccontextmanager
async def stranger(address: Multiaddr, identity: Identity | None = None) -> AsyncIterator[Stranger]:
    """Somebody who speaks TLS, connected to `address`."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=tls.dialling(), ssl_shutdown_timeout=0.1
        )
        try:
            yield Stranger(reader, writer, identity or Identity())
        finally:
            writer.transport.abort()


def connections(end: Recorder) -> int:
    return len(end.transport._links)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve, identity: Identity | None = None) -> AsyncIterator[int]:
    """A listener that is none of ours, as `identity` if it speaks TLS; its port."""
    context = tls.listening(identity)[0] if identity is not None else None
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_bytes_that_are_not_tls():
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


def test_a_peer_of_the_first_version_is_told_so_in_one_line(caplog):
    """That was ZeroMQ: its greeting comes first."""

    async def main():
        async with listener_and_friend() as (listener, _, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"\xff\0\0\0\0\0\0\0\1\x7f\3")
            assert b"speaks version 2 of its protocol" in await reader.read()
            writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())
    [line] = [record.getMessage() for record in caplog.records if "version 1" in record.getMessage()]
    what, to_do = "it speaks version 1 of Shoal's protocol, this peer version 2", "install the same version of Shoal"
    assert line == f"refused a connection: {what}; {to_do} on both machines"


def test_a_listener_of_the_first_version_is_named_as_such():
    async def main():
        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff\0\0\0\0\0\0\0\1\x7f")
            writer.close()

        async with listener_and_friend() as (_, friend, _), serving(greet) as port:
            with pytest.raises(HandshakeFailed, match="it speaks version 1 of Shoal's protocol, this peer version 2"):
                await friend.transport.dial(LOOPBACK.with_port(port).with_peer(Identity().peer_id))

    asyncio.run(main())


def test_tls_of_an_older_version_is_not_spoken():
    async def main():
        async with listener_and_friend() as (listener, _, address):
            context = tls.dialling()
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, OSError)):
                await asyncio.open_connection(address.host, address.port, ssl=context)
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


IMPOSTOR = Identity()


def changed(**fields: object) -> Callable[[Stranger, bytes], bytes]:
    return lambda who, nonce: who.hello(nonce, **fields)


def for_another(**other: bytes) -> Callable[[Stranger, bytes], bytes]:
    """A hello whose signature is good, but not for this link."""

    def hello(who: Stranger, nonce: bytes) -> bytes:
        assert who.listener is not None
        fields = {"listener": who.listener.key, "nonce": nonce, "certificate": who.certificate} | other
        signed = greeting.signed(
            who.identity.peer_id, PeerID(fields["listener"]), bytes(8), fields["nonce"], fields["certificate"]
        )
        return who.hello(nonce, signature=who.identity.sign(signed))

    return hello


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "not a greeting"),
        (b"garbage", "not a greeting"),
        (b"\xc1" * 1000, "not a greeting"),
        (b"\x91" * 4096, "not a greeting"),
        (encode([7, "what"]), "not a greeting"),
        (encode(["notice", "dht", 0, 0.0, {}]), "not a greeting"),
        (changed(peer=b"short"), "not a greeting"),
        (encode([3, "I refuse first"]), "Refusal is not expected now"),
        (encode(LinkKept()), "LinkKept is not expected now"),
        (encode([4, bytes(8)]), "Taken is not expected now"),
        (encode([5]), "Alive is not expected now"),
        (changed(version=3), "it speaks version 3 of Shoal's protocol, this peer version 2"),
        (changed(magic="shallow"), "it speaks 'shallow'"),
        (changed(peer=Identity().peer_id.key), "it has not proven to be"),
        (changed(peer=b"\xff" * 32), "it has not proven to be"),
        (changed(instance=b"12345678"), "it has not proven to be"),
        (changed(signature=bytes(64)), "it has not proven to be"),
        (for_another(listener=Identity().peer_id.key), "it has not proven to be"),
        (for_another(nonce=bytes(32)), "it has not proven to be"),
        (for_another(certificate=b"of somebody in between"), "it has not proven to be"),
    ],
)
def test_a_first_message_that_is_no_hello_is_refused_with_the_reason(first, reason):
    async def main():
        async with listener_and_friend() as (listener, _, address):
            async with stranger(address, IMPOSTOR) as who:
                challenge = await who.hear()
                assert isinstance(challenge, Challenge)
                await who.say(first if isinstance(first, bytes) else first(who, challenge.nonce))
                answer = await who.hear()
                await who.write(frames.encode(FrameKind.MESSAGE, b"a message", [b"a buffer"]))
                await who.say(who.hello(challenge.nonce))
                assert reason in answer.reason
                assert await who.is_over()
            await eventually(lambda: connections(listener) == 1)
            assert listener.messages == []
            assert not listener.transport.is_connected(IMPOSTOR.peer_id)
            assert listener.lost == []

    asyncio.run(main())


def head(kind: int, header: int, *buffers: int, number: int | None = None) -> bytes:
    """The first bytes of a frame."""
    sizes = [*buffers, 0, 0, 0, 0][:MAX_BUFFERS]
    count = len(buffers) if number is None else number
    return bytes([kind, count, 0, 0]) + b"".join(size.to_bytes(4) for size in (header, *sizes))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (head(FrameKind.MESSAGE, 5, 1 << 20), "a message came before the hello was answered"),
        (head(FrameKind.MESSAGE, 0), "a message came before the hello was answered"),
        (head(FrameKind.CONTROL, 4097), "a header of 4097 bytes"),
        (head(FrameKind.CONTROL, 5, 10), "1 buffers in one message exceed 0"),
        (head(7, 5), "unknown kind 7"),
    ],
)
def test_no_memory_is_taken_for_who_is_not_proven(data, reason):
    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address) as who:
            await who.hear()
            await who.write(data)
            assert reason in (await who.hear()).reason
            assert await who.is_over()
            assert listener.messages == []

    asyncio.run(main())


def test_more_bytes_than_a_hello_takes_before_the_proof(monkeypatch):
    monkeypatch.setattr(shoal.p2p.link, "PROOF_TIMEOUT", 100.0)

    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address) as who:
            await who.hear()
            await who.write(head(FrameKind.CONTROL, 4000))
            for _ in range(UNPROVEN_BYTES // 23):  # of which TLS adds 22
                await who.write(b"x")
            assert await who.is_over()
            await eventually(lambda: connections(listener) == 1)
        async with listener_and_friend() as (listener, _, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            # A handshake message of 60 kB, of which each TLS record has a little.
            record = b"\x16\x03\x01\x00\x40"
            writer.write(record + b"\x01\x00\xea\x60\x03\x03" + bytes(58))
            for _ in range(2 * UNPROVEN_BYTES // 69):
                writer.write(record + bytes(64))
            with suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_who_does_not_prove_who_it_is_in_time_is_thrown_out(monkeypatch, speaks_tls):
    monkeypatch.setattr(shoal.p2p.link, "PROOF_TIMEOUT", 0.3)

    async def main():
        async with listener_and_friend() as (listener, _, address):
            if speaks_tls:
                async with stranger(address) as who:
                    assert await who.is_over()
            else:
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(b"\x16\x03\x01")  # the beginning of a TLS record
                assert await reader.read() == b""
                writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (head(FrameKind.MESSAGE, 6, number=MAX_BUFFERS + 1), "5 buffers in one message exceed"),
        (head(FrameKind.MESSAGE, MAX_HEADER_BYTES + 1), "a header of"),
        (head(FrameKind.MESSAGE, 6, MAX_BUFFER_BYTES + 1), "a buffer of"),
        (head(FrameKind.MESSAGE, 6, 0xFFFFFFFF), "a buffer of"),
        (head(FrameKind.MESSAGE, 0xFFFFFFFF), "a header of"),
        (frames.encode(FrameKind.CONTROL, b"\xc1"), "not a greeting"),
        (frames.encode(FrameKind.CONTROL, encode([3, "too late"])), "Refusal is not expected now"),
        (b"\xff" * 1000, "unknown kind 255"),
    ],
)
def test_who_breaks_a_bound_is_lost_and_nobody_else(data, reason):
    async def main():
        async with listener_and_friend() as (listener, _, address):
            async with stranger(address, IMPOSTOR) as who:
                await who.join()
                await who.write(frames.encode(FrameKind.MESSAGE, b"a good one"))
                await who.write(data)
                await who.write(frames.encode(FrameKind.MESSAGE, b"another one"))
                assert reason in await listener.until_lost(IMPOSTOR.peer_id)
                assert await who.is_over()
            assert listener.headers == [b"a good one"]
            assert not listener.transport.is_connected(IMPOSTOR.peer_id)
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


def test_bytes_that_tls_does_not_accept_end_a_link():
    """Somebody in between can end a link, and do no more."""

    async def main():
        async with listener_and_friend() as (listener, friend, _):
            [link] = friend.transport._links
            link.socket.send(b"\x17\x03\x03\x00\x20" + os.urandom(32))
            assert "does not speak TLS" in await listener.until_lost(friend.transport.peer_id)
            await friend.until_lost(listener.transport.peer_id)
            await friend.transport.dial(listener.transport._listeners[0] and await listener.transport.listen(LOOPBACK))
            listener.lost.clear()
            friend.lost.clear()

    asyncio.run(main())


def test_bytes_that_tls_does_not_accept_before_the_proof():
    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address) as who:
            await who.hear()
            os.write(who.writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + os.urandom(32))
            assert await who.is_over()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())


def test_an_unknown_token_of_a_lane_ends_its_connection():
    """Also one that comes in pieces, or never whole."""

    async def main():
        async with listener_and_friend() as (listener, _, address):
            tokens: list[bytes] = []
            came = listener.transport.token_came

            def token_came(link: Link, token: bytes) -> None:
                tokens.append(token)
                came(link, token)

            listener.transport.token_came = token_came
            streams = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
            streams[0][1].write(bytes(31))
            streams[1][1].write(bytes(32) + b"more")
            streams[2][1].write(bytes(10))
            await eventually(lambda: connections(listener) == 3)
            assert tokens == [bytes(32)]
            streams[0][1].write(b"!and more")
            with suppress(ConnectionResetError):
                assert await streams[0][0].read() == b""
            assert tokens == [bytes(32), bytes(31) + b"!"]
            streams[2][1].close()
            await eventually(lambda: connections(listener) == 1)
            for _, writer in streams:
                writer.close()

    asyncio.run(main())


def test_what_a_lost_link_had_of_a_message_goes_at_once():
    """Not when Python looks for cycles."""

    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address, IMPOSTOR) as who:
            await who.join()
            await who.write(head(FrameKind.MESSAGE, 4, 4 << 20) + b"slow" + bytes(1000))
            await eventually(lambda: listener.transport.shared.unfinished.free < shoal.p2p.shared.UNFINISHED_BYTES)
            link = weakref.ref(listener.transport._peers[IMPOSTOR.peer_id])
            gc.collect()
            gc.disable()
            try:
                listener.transport.disconnect(IMPOSTOR.peer_id)
                await eventually(lambda: link() is None, timeout=5)
            finally:
                gc.enable()

    asyncio.run(main())


def test_tiny_messages_without_end_do_not_hold_up_the_loop():
    async def main():
        async with listener_and_friend() as (listener, _, address), stranger(address, IMPOSTOR) as who:
            await who.join()
            seen = [0]

            async def look() -> None:  # once in every turn of the loop
                while seen[-1] < 40_000:
                    await asyncio.sleep(0)
                    seen.append(len(listener.messages))

            looking = asyncio.create_task(look())
            await who.write(frames.encode(FrameKind.MESSAGE, b"") * 40_000)
            await looking
            assert max(later - before for before, later in pairwise(seen)) <= 128

    asyncio.run(main())


def test_unfinished_messages_share_one_budget(monkeypatch):
    """Who does not get memory waits, and the one that has kept others waiting for longest goes."""
    monkeypatch.setattr(shoal.p2p.shared, "UNFINISHED_BYTES", 9 << 20)
    monkeypatch.setattr(shoal.p2p.budget, "PATIENCE", 0.5)

    async def main():
        async with listener_and_friend() as (listener, friend, address):
            slow = [Identity() for _ in range(2)]
            async with stranger(address, slow[0]) as one, stranger(address, slow[1]) as two:
                for who in (one, two):
                    await who.join()
                    await who.write(head(FrameKind.MESSAGE, 4, 4 << 20) + b"slow" + bytes(1000))
                await eventually(lambda: listener.transport.shared.unfinished.free < 2 << 20)
                friend.transport.send([address.peer_id], b"small", [b"passes"])
                await listener.until(lambda: b"small" in listener.headers)
                friend.transport.send([address.peer_id], b"large", [bytes(4 << 20)])
                await listener.until_lost(slow[0].peer_id)
                assert [reason for _, reason in listener.lost] == ["its message took too long"]
                await listener.until(lambda: b"large" in listener.headers)
                assert listener.transport.is_connected(slow[1].peer_id)
                await two.write(bytes((4 << 20) - 1000))
                await listener.until(lambda: b"slow" in listener.headers)
            await eventually(lambda: listener.transport.shared.unfinished.free == 9 << 20)

    asyncio.run(main())


def test_handshakes_at_once_are_bounded_per_address_and_in_all(monkeypatch, caplog):
    monkeypatch.setattr(shoal.p2p.listener, "HANDSHAKES_PER_ADDRESS", 4)
    monkeypatch.setattr(shoal.p2p.listener, "HANDSHAKES", 6)

    async def main():
        async with sockets(None) as (listener,):
            address = await listener.transport.listen(Multiaddr("/ip4/0.0.0.0/tcp/0"))

            async def open_from(number: int, source: str) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
                where = {"host": "127.0.0.1", "port": address.port, "local_addr": (source, 0)}
                return [await asyncio.open_connection(**where) for _ in range(number)]

            streams = await open_from(10, "127.0.0.1")
            await eventually(lambda: connections(listener) == 4)
            assert "4 others from 127.0.0.1 are about to prove who they are" in caplog.text
            streams += await open_from(10, "127.0.0.2")
            await eventually(lambda: connections(listener) == 6)
            assert "6 others are about to prove who they are" in caplog.text
            for _, writer in streams:
                writer.close()
            await eventually(lambda: connections(listener) == 0)
            # Who has proven who it is takes no place among them.
            friends = [address.with_peer(listener.transport.peer_id)] * 8
            async with sockets(*[None] * 8) as others:
                for other, where in zip(others, friends, strict=True):
                    await other.transport.dial(Multiaddr(str(where).replace("0.0.0.0", "127.0.0.1")))
                assert connections(listener) == 8

    asyncio.run(main())


def test_addresses_of_one_ipv6_network_count_as_one():
    admission = shoal.p2p.listener.Admission(10_000)
    for number in range(shoal.p2p.listener.HANDSHAKES_PER_ADDRESS):
        assert admission.refusal(f"2001:db8:0:1:{number:x}::1") == ""
        admission.enter(number, f"2001:db8:0:1:{number:x}::1")
    assert "others from 2001:db8:0:1::/64" in admission.refusal("2001:db8:0:1::ffff%eth0")
    assert admission.refusal("2001:db8:0:2::1") == ""
    for number in range(shoal.p2p.listener.HANDSHAKES_PER_ADDRESS):
        admission.enter(-1 - number, "::ffff:192.0.2.1")
    assert "others from 192.0.2.1" in admission.refusal("192.0.2.1")
    assert admission.refusal("::ffff:192.0.2.2") == ""
    admission.proven(0)
    admission.leave(1)
    assert admission.refusal("2001:db8:0:1::ffff") == ""


def test_connections_of_one_peer_are_bounded(monkeypatch):
    """Those that were refused and do not leave count."""
    monkeypatch.setattr(shoal.p2p.link, "REFUSAL_TIME", 100.0)

    async def main():
        async with listener_and_friend() as (listener, _, address), AsyncExitStack() as stack:
            others = [await stack.enter_async_context(stranger(address, IMPOSTOR)) for _ in range(20)]
            for number, who in enumerate(others):
                nonce, instance = (await who.hear()).nonce, number.to_bytes(8)
                signed = greeting.signed(IMPOSTOR.peer_id, address.peer_id, instance, nonce, who.certificate)
                who.stop_reading()
                await who.say(who.hello(nonce, instance=instance, signature=IMPOSTOR.sign(signed)))
            await eventually(lambda: connections(listener) == 1 + shoal.p2p.sockets.LINKS_PER_PEER)
            await asyncio.sleep(0.05)
            assert connections(listener) == 1 + shoal.p2p.sockets.LINKS_PER_PEER

    asyncio.run(main())


def test_more_connections_than_there_are_descriptors_for(monkeypatch, caplog):
    monkeypatch.setattr(shoal.p2p.sockets, "most_connections", lambda: 4)

    async def main():
        async with listener_and_friend() as (listener, _, address):
            streams = [await asyncio.open_connection(address.host, address.port) for _ in range(10)]
            await eventually(lambda: connections(listener) == 4)
            for _, writer in streams:
                writer.close()
            await eventually(lambda: connections(listener) == 1)

    asyncio.run(main())
    assert "there are 4 already" in caplog.text


def test_the_soft_limit_of_descriptors_is_raised(monkeypatch):
    limits = {"now": (1024, 4096)}
    fake = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=-1,
        getrlimit=lambda _: limits["now"],
        setrlimit=lambda _, new: limits.update(now=new),
    )
    monkeypatch.setattr(shoal.p2p.listener, "resource", fake)
    assert shoal.p2p.listener.most_connections() == 4096 - 256
    assert limits["now"] == (4096, 4096)


def test_a_listener_out_of_descriptors_keeps_what_it_has_and_accepts_again(monkeypatch, caplog):
    monkeypatch.setattr(shoal.p2p.listener, "ACCEPT_AGAIN", 0.05)

    async def main():
        async with listener_and_friend() as (listener, friend, address), sockets(None) as (late,):
            [accepting] = listener.transport._listeners
            real = accepting._socket

            class Full:
                fails = 0

                def accept(self):
                    self.fails += 1
                    raise OSError(24, "Too many open files")

                def fileno(self):
                    return real.fileno()

            accepting._socket = full = Full()
            dial = asyncio.create_task(late.transport.dial(address))
            await eventually(lambda: full.fails > 3)
            friend.transport.send([address.peer_id], b"still here")
            await listener.until_messages(1)
            assert not dial.done()
            accepting._socket = real
            await asyncio.wait_for(dial, 60)

    asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "no connection can be accepted for now: Too many open files; those that are there stay"
    ]


def challenge(**fields: object) -> bytes:
    good = {"magic": MAGIC, "version": VERSION, "instance": bytes(8), "nonce": bytes(32)}
    return said(encode(Challenge(**(good | fields))))


def said(payload: bytes) -> bytes:
    return frames.encode(FrameKind.CONTROL, payload)


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        (said(b"garbage"), b"", "not a greeting"),
        (challenge(version=9), b"", "version 9"),
        (challenge(magic="shallow"), b"", "it speaks 'shallow'"),
        (said(encode(LinkKept())), b"", "LinkKept is not expected now"),
        (said(encode([3, "go away"])), b"", "it refused: go away"),
        (challenge(), challenge(), "Challenge is not expected now"),
        (challenge(), said(b"garbage"), "not a greeting"),
        (challenge(), said(encode([3, "go away"])), "it refused: go away"),
        (challenge(), frames.encode(FrameKind.MESSAGE, b"early"), "a message came before the hello was answered"),
        (challenge(), head(FrameKind.CONTROL, 100_000), "a header of"),
    ],
)
def test_a_listener_that_answers_with_something_else(first, then, reason):
    async def main():
        identity = Identity()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                writer.write(first)
                await reader.readexactly(24)
                writer.write(then)
                await reader.read()
            writer.transport.abort()

        async with listener_and_friend() as (_, friend, _), serving(serve, identity) as port, asyncio.timeout(60):
            with pytest.raises(HandshakeFailed, match=reason):
                await friend.transport.dial(LOOPBACK.with_port(port).with_peer(identity.peer_id))
            assert friend.messages == []
            assert not friend.transport.is_connected(identity.peer_id)

    asyncio.run(main())


def test_a_dialler_says_nothing_to_who_is_not_the_peer_that_it_dialled():
    """Not even who it is."""

    async def main():
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(challenge())
            with suppress(OSError):
                heard.append(await reader.read())
            writer.transport.abort()

        async with listener_and_friend() as (_, friend, _), serving(serve, Identity()) as port, asyncio.timeout(60):
            with pytest.raises(HandshakeFailed, match="cannot prove to be that peer"):
                await friend.transport.dial(LOOPBACK.with_port(port).with_peer(Identity().peer_id))
            await asyncio.sleep(0.1)
            assert b"".join(heard) == b""

    asyncio.run(main())


def test_a_listener_that_speaks_no_tls():
    async def main():
        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with listener_and_friend() as (_, friend, _), serving(serve) as port:
            with pytest.raises(HandshakeFailed, match="does not speak TLS"):
                await friend.transport.dial(LOOPBACK.with_port(port).with_peer(Identity().peer_id))

    asyncio.run(main())
