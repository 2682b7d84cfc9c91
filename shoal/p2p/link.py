"""One TCP connection between two peers, TLS 1.3 inside, driven by the asyncio loop.

The socket is ours, not an asyncio transport's: when a send fails, those drop what has arrived before; and they wait
30 s for the other side's goodbye.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import nullcontext, suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from shoal.p2p import forks, frames, greeting, tcp
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.frames import Kind
from shoal.p2p.identity import PeerID
from shoal.p2p.movement import LARGE_BYTES

if TYPE_CHECKING:
    from shoal.p2p.sockets import SocketTransport

T = TypeVar("T")

QUEUE_BYTES = 128 << 20  # that wait for one peer; more than a peer that keeps the rules can be owed
PROOF_TIMEOUT = 10.0  # seconds that one who connects has to prove who it is
UNPROVEN_BYTES = 16 << 10  # that may come before a link is open; a handshake and a hello take about 1 kB
RECEIVE_BYTES = 64 << 10  # at a time
_STEPS = 64  # of TLS at a time, before the loop may do something else


class Stage(Enum):
    """What a link can do. It goes on to the next, or to `ENDED` from any."""

    CONNECTING = auto()  # dialled; TCP is not there yet
    SECURING = auto()  # the TLS handshake is under way
    GREETING = auto()  # encrypted; only the two transports talk
    OPEN = auto()  # messages pass
    FINISHING = auto()  # what is queued leaves, nothing is heard any more
    ENDED = auto()


class Link:
    """A connection, from its beginning to its end, of which `owner` is told.

    Args:
        owner: told what happens: `secured`, `heard`, `received`, `broke`, `lane_came`; and `ended`, once, never from
            within a call.
        connection: a socket that does not block; this link's alone.
        context: of TLS.
        address: whom this side dials; None if the other side has.

    Attributes:
        peer: who is at the other end: whom it must be if this side dialled, None until that is proven if not.
        instance: which start of that peer; b"" until it is known.
        nonce: what the dialler signs.
        certificate: of a dialled link: the other side's, DER.
        challenged, outcome: of a dialled link: done when the listener has challenged, and when messages pass or never
            will.
        said_hello: of a dialled link: whether the listener may keep it.
        error: what `ended` means for who dialled.
    """

    def __init__(
        self,
        owner: SocketTransport,
        connection: socket.socket,
        context: ssl.SSLContext,
        address: tuple[str, int] | None,
    ) -> None:
        self.socket = connection
        self.dialled = address is not None
        self.peer: PeerID | None = None
        self.instance = self.nonce = self.certificate = b""
        self.said_hello = False
        self.error: type[PeerUnreachable] = PeerUnreachable
        self.stage = Stage.CONNECTING
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.challenged: asyncio.Future[None] = self._loop.create_future()
        self.outcome: asyncio.Future[None] = self._loop.create_future()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not self.dialled)
        self._received = 0  # bytes, encrypted
        self._sealed = 0  # bytes, encrypted, that were queued
        self._unsent = bytearray()  # of these, what the kernel has not taken
        self._deaf = False  # the other side takes nothing any more
        self._large_in = self._large_out = 0  # bytes of large messages that came, and that were queued
        self._steps = 0
        self._proof = asyncio.timeout(None if self.dialled else PROOF_TIMEOUT)
        self._task = self._loop.create_task(self._run(address))
        forks.close_in_children(connection)

    def open(self) -> None:
        """Both sides are proven: messages pass."""
        self.stage = Stage.OPEN
        self._proof.reschedule(None)

    # -- end

    def finish(self, seconds: float, reason: str) -> None:
        """End it when what is queued has left and the other side has closed, or after `seconds`. Nothing is heard
        meanwhile."""
        if self.stage not in (Stage.FINISHING, Stage.ENDED):
            self.stage = Stage.FINISHING
            self._task.cancel()
            self._task = self._loop.create_task(self._drain(seconds, reason))

    async def _drain(self, seconds: float, reason: str) -> None:
        with suppress(OSError):  # a time-out is one, and the end, too
            async with asyncio.timeout(seconds):
                self._flush()
                while True:
                    await self._bytes(RECEIVE_BYTES)
                    await asyncio.sleep(0)
        self.end(reason)

    def end(self, reason: str, error: type[PeerUnreachable] = PeerUnreachable) -> None:
        """End it now; what is queued is dropped."""
        if self.stage is not Stage.ENDED:
            self.stage, self.error = Stage.ENDED, error
            self._task.cancel()
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self.socket.close()
            self._unsent.clear()
            self._loop.call_soon(self._owner.ended, self, reason)

    # -- out

    def say(self, said: greeting.Said) -> None:
        """Tell the other transport something."""
        self.send(frames.encode(Kind.CONTROL, greeting.encode(said)))

    def send(self, frame: bytes) -> None:
        """Queue a frame; if the queue is full, the link ends. One to a link that ended is dropped."""
        if self.stage in (Stage.GREETING, Stage.OPEN) and not self._deaf:
            self._tls.write(frame)
            self._large_out += len(frame) if len(frame) >= LARGE_BYTES else 0
            self._flush()

    def _flush(self) -> None:
        """Give the kernel what it has room for."""
        sealed = self._outgoing.read()
        self._sealed += len(sealed)
        self._unsent += sealed
        if len(self._unsent) > QUEUE_BYTES:
            return self.end("its queue is full")
        try:
            if self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # What had come from it before is still to be read, and then its end.
            self._deaf = True
            self._unsent.clear()
        if self._unsent:
            return self._loop.add_writer(self.socket, self._flush)
        self._loop.remove_writer(self.socket)
        if self.stage is Stage.FINISHING:
            with suppress(OSError):  # it has ended, which is read next
                self.socket.shutdown(socket.SHUT_WR)

    def moved(self) -> int:
        """See `Transport.moved`."""
        under_way = max(0, self._sealed - tcp.counts(self.socket)[0])
        return self._large_in + max(0, self._large_out - under_way)

    # -- in

    async def _run(self, address: tuple[str, int] | None) -> None:
        try:
            async with self._proof:
                if address is not None:
                    await self._loop.sock_connect(self.socket, address)
                tcp.prepare(self.socket)
                self.stage = Stage.SECURING
                await self._step(self._tls.do_handshake)
                self.stage = Stage.GREETING
                self.certificate = self._tls.getpeercert(binary_form=True) or b""
                self._owner.secured(self)
                while self.stage in (Stage.GREETING, Stage.OPEN):
                    await self._hear()
        except ssl.SSLError as error:
            self._owner.broke(self, f"it does not speak TLS 1.3: {error.reason}")
        except ValueError as error:
            self._owner.broke(self, str(error))
        except ConnectionRefusedError:
            self.end("nobody listens there")
        except OSError as error:
            self.end(f"its connection was lost: {os.strerror(error.errno)}" if error.errno else "it took too long")

    async def _hear(self) -> None:
        """Receive a frame, every part into memory of its own."""
        kind, sizes = frames.announced(await self._read(frames.HEAD_BYTES), opened=self.stage is Stage.OPEN)
        large = sum(sizes) >= LARGE_BYTES
        async with self._owner.budget.memory(self, sum(sizes)) if large else nullcontext():
            header, *buffers = [await self._read(size, large=large) for size in sizes]
        if kind is Kind.MESSAGE:
            self._owner.received(self, header, buffers)
        else:
            self._owner.heard(self, header)

    async def _read(self, size: int, *, large: bool = False) -> memoryview:
        whole = rest = memoryview(bytearray(size))
        while rest:
            number = int(await self._step(lambda: self._tls.read(len(rest), rest)))  # noqa: B023 - called at once
            if not number:
                raise ConnectionResetError(errno.ECONNRESET, "TLS has ended")
            rest = rest[number:]
            self._large_in += number if large else 0
        return whole

    async def _step(self, step: Callable[[], T]) -> T:
        """Let TLS do something, as soon as what it needs has come."""
        while True:
            self._steps += 1
            if not self._steps % _STEPS:
                await asyncio.sleep(0)
            with suppress(ssl.SSLWantReadError):
                try:
                    return step()
                finally:
                    if self._outgoing.pending:
                        self._flush()
            await self._receive()

    async def _receive(self) -> None:
        most = RECEIVE_BYTES if self.stage is Stage.OPEN else UNPROVEN_BYTES - self._received
        if not most:
            raise ValueError(f"it sent {UNPROVEN_BYTES} bytes and has not proven who it is")
        data = await self._bytes(most if self._received else greeting.TOKEN_BYTES)
        if not self._received and data.startswith(greeting.FIRST_VERSION):
            self._unsent += b"" if self.dialled else greeting.OUTDATED
            raise ValueError(f"it speaks version 1 of Shoal's protocol, this peer version {greeting.VERSION}")
        if not self._received and data.startswith(greeting.LANE_BYTE) and not self.dialled:
            while len(data) < greeting.TOKEN_BYTES:
                data += await self._bytes(greeting.TOKEN_BYTES - len(data))
            self._owner.lane_came(self, data)
            await asyncio.sleep(0)  # the link has ended, and with it this task
        self._received += len(data)
        self._incoming.write(data)

    async def _bytes(self, most: int) -> bytes:
        data = await self._loop.sock_recv(self.socket, most)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "TCP has ended")
        return data
