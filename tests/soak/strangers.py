"""Strangers that know the protocol, as a process of its own: they attack one peer in every way that is known here.

Obeys JSON lines on stdin, answers with JSON lines on stdout. Each attack has its own connections and its own identity.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from shoal.p2p import frames, greeting, tls
from shoal.p2p.frames import FrameKind
from shoal.p2p.greeting import MAGIC, VERSION, Challenge, Key, LinkHello, LinkKept, Token
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sealing import Header, LaneKeys, Sealer, sealed_bytes, suite_of

encode = msgspec.msgpack.encode
MOST_SECONDS = 3.0  # that an attack holds on to its connection
AT_ONCE = 8
FLOOD = 1_000_000  # tiny frames


class Stranger:
    """A TLS connection to the victim, as an identity of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.identity = reader, writer, Identity()
        self.certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.victim = tls.peer_of(self.certificate)

    async def hear(self) -> Any:
        """What the victim's transport says next; its messages are read and forgotten."""
        while True:
            head = await self.reader.readexactly(24)
            sizes = struct.unpack("!5I", head[4:])
            payload = await self.reader.readexactly(sum(sizes))
            if head[0] == FrameKind.CONTROL:
                return greeting.decode(memoryview(payload))

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def say(self, said: bytes) -> None:
        await self.write(frames.encode(FrameKind.CONTROL, said))

    async def hello(self, **changed: object) -> bytes:
        """A good hello, but for what is changed."""
        challenge = await self.hear()
        assert isinstance(challenge, Challenge)
        assert self.victim is not None
        me, instance = self.identity.peer_id, os.urandom(8)
        signed = greeting.signed(me, self.victim, instance, challenge.nonce, self.certificate)
        fields = {"magic": MAGIC, "version": VERSION, "instance": instance, "peer": me.key}
        return encode(LinkHello(**(fields | {"signature": self.identity.sign(signed)} | changed)))

    async def join(self) -> None:
        """Become a peer of the victim."""
        await self.say(await self.hello())
        assert isinstance(await self.hear(), LinkKept)
        await self.say(encode(LinkKept()))


class Strangers:
    """The attacks, each of which a seed draws.

    Args:
        address: of the victim.
    """

    def __init__(self, address: Multiaddr, rng: random.Random) -> None:
        self.host, self.port, self.rng = address.host, address.port, rng
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.attacks: list[Callable[[], Awaitable[None]]] = [
            self.no_tls,
            self.half_a_handshake,
            self.connects_and_goes,
            self.garbage_for_a_hello,
            self.wrong_hello,
            self.good_hello_then_garbage,
            self.garbage_below_tls,
            self.half_a_large_message,
            self.tiny_frames,
            self.never_reads,
            self.silent,
            self.unknown_token,
            self.many_without_a_token,
            self.lane_of_garbage,
            self.silent_lane,
            self.lane_that_stops,
        ]

    async def run(self, over: asyncio.Event, rate: float) -> None:
        """Attack, about `rate` times a second, until it is over."""

        async def attacks() -> None:
            while not over.is_set():
                await self.one(self.rng.choice(self.attacks))
                await asyncio.sleep(self.rng.uniform(0, 2 * AT_ONCE / rate))

        await asyncio.gather(*(attacks() for _ in range(AT_ONCE)))

    async def flood(self) -> None:
        """As many tiny frames as the victim takes."""
        await self.tiny_frames(FLOOD)

    async def one(self, attack: Callable[[], Awaitable[None]], seconds: float = 2 * MOST_SECONDS) -> None:
        """One attack: what the victim does about it is its business."""
        self.counts[attack.__name__] += 1
        try:
            async with asyncio.timeout(seconds):
                await attack()
        except (OSError, ssl.SSLError, asyncio.IncompleteReadError, TimeoutError):
            pass  # it was thrown out
        except Exception as error:  # noqa: BLE001 (told to the driver, which fails)
            self.failures.append(f"{attack.__name__}: {error!r}")

    # -- connections

    def _plain(self) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), timeout=MOST_SECONDS)
        connection.setblocking(False)
        return connection

    async def _raw(self, data: bytes, seconds: float = 0.0, reset: bool = False) -> None:
        """Send bytes over a connection without TLS, hold it, and end it, by a reset or not."""
        with self._plain() as connection:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, data)
            await self._hold(connection, seconds)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _hold(self, connection: socket.socket, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
                    pass

    async def _stranger(self) -> Stranger:
        reader, writer = await asyncio.open_connection(
            self.host, self.port, ssl=tls.dialling(), ssl_shutdown_timeout=0.1
        )
        return Stranger(reader, writer)

    async def _as_stranger(self, act: Callable[[Stranger], Awaitable[None]]) -> None:
        who = await self._stranger()
        try:
            await act(who)
        finally:
            who.writer.transport.abort()

    def _seconds(self) -> float:
        """How long something is held: in general not long, so that there are many."""
        return self.rng.choice([0.0, 0.05, 0.3, MOST_SECONDS])

    # -- before the proof

    async def no_tls(self) -> None:
        data = self.rng.randbytes(self.rng.choice([1, 10, 1000, 100_000]))
        await self._raw(data, self._seconds(), self.rng.random() < 0.5)

    async def connects_and_goes(self) -> None:
        for _ in range(self.rng.choice([1, 10, 50])):
            await self._raw(b"", 0.0, self.rng.random() < 0.5)

    async def half_a_handshake(self) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            tls.dialling().wrap_bio(incoming, outgoing).do_handshake()
        hello = outgoing.read()
        await self._raw(hello[: self.rng.randint(1, len(hello))], self._seconds(), self.rng.random() < 0.5)

    async def garbage_for_a_hello(self) -> None:
        async def act(who: Stranger) -> None:
            await who.write(self.rng.randbytes(self.rng.choice([1, 24, 5000, 100_000])))
            await who.reader.read()

        await self._as_stranger(act)

    async def wrong_hello(self) -> None:
        async def act(who: Stranger) -> None:
            hello = bytearray(await who.hello())
            hello[self.rng.randrange(len(hello))] ^= 1 << self.rng.randrange(8)
            await who.say(bytes(hello))
            await who.reader.read()

        await self._as_stranger(act)

    # -- as a peer

    async def good_hello_then_garbage(self) -> None:
        async def act(who: Stranger) -> None:
            await who.join()
            kind = self.rng.choice([FrameKind.CONTROL, FrameKind.MESSAGE])
            garbage = self.rng.randbytes(self.rng.choice([1, 100, 4000]))
            for _ in range(self.rng.choice([1, 100])):
                await who.write(self.rng.choice([garbage, frames.encode(kind, garbage)]))
            await who.reader.read()

        await self._as_stranger(act)

    async def garbage_below_tls(self) -> None:
        async def act(who: Stranger) -> None:
            await who.join()
            descriptor = os.dup(who.writer.get_extra_info("socket").fileno())
            with socket.socket(fileno=descriptor) as connection:
                connection.send(b"\x17\x03\x03\x00\x40" + self.rng.randbytes(64))
            await who.reader.read()

        await self._as_stranger(act)

    async def half_a_large_message(self) -> None:
        async def act(who: Stranger) -> None:
            await who.join()
            whole = frames.encode(FrameKind.MESSAGE, b"header", [bytes(4 << 20)])
            await who.write(whole[: self.rng.randrange(len(whole))])
            await asyncio.sleep(self._seconds())

        await self._as_stranger(act)

    async def tiny_frames(self, number: int = 2000) -> None:
        async def act(who: Stranger) -> None:
            await who.join()
            tiny = frames.encode(FrameKind.MESSAGE, b"\xc0") * 100
            for _ in range(number // 100):
                await who.write(tiny)

        await self._as_stranger(act)

    async def never_reads(self) -> None:
        """The victim answers each message, and nobody takes the answers."""

        async def act(who: Stranger) -> None:
            await who.join()
            transport: Any = who.writer.transport
            transport.pause_reading()
            for _ in range(20):
                await who.write(frames.encode(FrameKind.MESSAGE, b"\xc0") * 100)
            await asyncio.sleep(self._seconds())

        await self._as_stranger(act)

    async def silent(self) -> None:
        async def act(who: Stranger) -> None:
            await who.join()
            await asyncio.sleep(self._seconds())

        await self._as_stranger(act)

    # -- lanes

    async def unknown_token(self) -> None:
        token = b"\0" + self.rng.randbytes(31)
        await self._raw(token[: self.rng.choice([1, 31, 32])] + self.rng.randbytes(1000), self._seconds())

    async def many_without_a_token(self) -> None:
        """What only a lane begins with, many times at once, and no more."""
        with ExitStack() as stack:
            connections = [stack.enter_context(self._plain()) for _ in range(self.rng.choice([10, 50]))]
            for connection in connections:
                await asyncio.get_running_loop().sock_sendall(connection, b"\0")
            await asyncio.sleep(self._seconds())

    async def _with_token(self, act: Callable[[socket.socket, bytes, Sealer], Awaitable[None]]) -> None:
        """Be a peer, be given the token of a lane, and connect for it."""

        async def peer(who: Stranger) -> None:
            await who.join()
            key = os.urandom(32)
            await who.say(encode(Key(key, True, False)))
            token = await who.hear()
            assert isinstance(token, Token)
            keys = LaneKeys(suite_of(token.aes), key, token.key)
            with self._plain() as connection:
                await act(connection, token.token, Sealer(keys.suite, keys.sealing))

        await self._as_stranger(peer)

    async def lane_of_garbage(self) -> None:
        async def act(connection: socket.socket, token: bytes, _sealer: Sealer) -> None:
            garbage = self.rng.randbytes(self.rng.choice([1, 528, 100_000]))
            await asyncio.get_running_loop().sock_sendall(connection, token + garbage)
            await self._hold(connection, self._seconds())

        await self._with_token(act)

    async def silent_lane(self) -> None:
        async def act(connection: socket.socket, token: bytes, _sealer: Sealer) -> None:
            await asyncio.get_running_loop().sock_sendall(connection, token[: self.rng.choice([16, 32])])
            await self._hold(connection, self._seconds())

        await self._with_token(act)

    async def lane_that_stops(self) -> None:
        """A good lane, in the middle of whose chunk everything ends, or garbage comes."""

        async def act(connection: socket.socket, token: bytes, sealer: Sealer) -> None:
            loop = asyncio.get_running_loop()
            greeted, chunk = bytearray(sealed_bytes(0)), bytearray(sealed_bytes(4 << 20))
            sealer.seal(Header(0, bytes(24), b"shoal lane 1"), memoryview(b""), memoryview(greeted))
            sealer.seal(Header(4 << 20, bytes(24), b"\xc0"), memoryview(bytes(4 << 20)), memoryview(chunk))
            await loop.sock_sendall(connection, token + greeted)
            await loop.sock_recv(connection, 1 << 16)
            await loop.sock_sendall(connection, chunk[: self.rng.randrange(len(chunk))])
            if self.rng.random() < 0.5:
                await loop.sock_sendall(connection, self.rng.randbytes(100_000))
            await self._hold(connection, self._seconds())

        await self._with_token(act)


async def main() -> None:
    options = json.loads(sys.argv[1])
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each connection on which it is thrown out
    os.nice(10)  # what is asked is what the victim does, not who has the processor
    strangers = Strangers(Multiaddr(options["address"]), random.Random(options["seed"]))
    print(json.dumps({"addresses": [], "peer": ""}), flush=True)
    attacking: asyncio.Task[None] | None = None
    over = asyncio.Event()
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        match command["do"]:
            case "attack":
                over.clear()
                attacking = asyncio.create_task(strangers.run(over, command["rate"]))
            case "stop":
                over.set()
                if attacking is not None:
                    await attacking
            case "flood":
                await strangers.one(strangers.flood, command["seconds"])
        print(json.dumps({"counts": strangers.counts, "failures": strangers.failures[:20]}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
