"""One TCP connection between two peers, TLS 1.3 inside, driven by the asyncio loop.

The socket is ours, not an asyncio transport's: those wait 30 s for the other side's goodbye, keep unsent bytes in
memory that is moved at every send, and end what has arrived when a send fails.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING

from shoal.p2p import forks, frames, greeting, tcp
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.frames import Frame, Kind, Reader
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Address, Lane
from shoal.p2p.movement import LARGE_BYTES

if TYPE_CHECKING:
    from shoal.p2p.sockets import SocketTransport

QUEUE_BYTES = 128 << 20  # that wait for one peer; more than a peer that keeps the rules can be owed
UNPROVEN_BYTES = 16 << 10  # that may come before a link is open; a handshake and a hello take about 1 kB
RECEIVE_BYTES = 256 << 10  # at a time
_SEND_BYTES = 256 << 10  # that are encrypted at a time
_SENDS = 4  # at a time, before the loop may do something else
_BATCH = 64  # pieces of messages that are handled in one go
_MESSAGE_OVERHEAD = 256  # bytes that a queued message takes besides its own


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
        owner: told what happens: `secured`, `outdated`, `heard`, `received`, `broke`; and `ended`, once, never from
            within a call.
        connection: a socket that does not block; this link's alone.
        context: of TLS.
        dialled: whether this side dialled.

    Attributes:
        peer: who is at the other end: whom it must be if this side dialled, None until that is proven if not.
        instance: which start of that peer; b"" until it is known.
        nonce: what the dialler signs.
        challenged, outcome: of a dialled link: done when the listener has challenged, and when messages pass or never
            will.
        said_hello: of a dialled link: whether the listener may keep it.
        error: what `ended` means for who dialled.
        lane: beside it, if there is one.
        keys: what this side seals with on each of the lane's connections; `dialled_lanes` of them are in use, if this
            side dialled.
    """

    def __init__(
        self, owner: SocketTransport, connection: socket.socket, context: ssl.SSLContext, *, dialled: bool
    ) -> None:
        self.socket = connection
        self.dialled = dialled
        self.peer: PeerID | None = None
        self.instance = self.nonce = b""
        self.said_hello = False
        self.error: type[PeerUnreachable] = PeerUnreachable
        self.lane: Lane | None = None
        self.keys: list[bytes] = []
        self.dialled_lanes = 0
        self.stage = Stage.CONNECTING
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.challenged: asyncio.Future[None] = self._loop.create_future()
        self.outcome: asyncio.Future[None] = self._loop.create_future()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not dialled)
        self._reader = Reader()
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0  # bytes, encrypted
        self._more = False  # to do with what was received
        self._queue: deque[memoryview] = deque()
        self._queued = 0  # bytes in the queue
        self._encrypted = memoryview(b"")  # that the kernel has not taken
        self._taken = 0  # encrypted bytes that the kernel has taken
        self._large_out = 0  # bytes of large messages that were queued
        self._writing = False  # when the kernel has room
        self._deaf = False  # the other side takes nothing any more
        forks.close_in_children(connection)

    # -- beginning

    def connect(self, address: tuple[str, int]) -> None:
        """Dial."""
        tcp.prepare(self.socket)
        number = self.socket.connect_ex(address)
        if number in (0, errno.EINPROGRESS):
            self._loop.add_writer(self.socket, self._connected)
        else:
            self._unreachable(number)

    def _connected(self) -> None:
        self._loop.remove_writer(self.socket)
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._unreachable(number)
        else:
            self.secure()

    def _unreachable(self, number: int) -> None:
        self.end("nobody listens there" if number == errno.ECONNREFUSED else os.strerror(number))

    def secure(self) -> None:
        """TCP is there: begin with TLS."""
        self.stage = Stage.SECURING
        self._loop.add_reader(self.socket, self._readable)
        self._advance()

    @property
    def address(self) -> Address:
        """Where the other side is."""
        address: Address = self.socket.getpeername()
        return address

    def certificate(self) -> bytes:
        """The other side's, DER."""
        return self._tls.getpeercert(binary_form=True) or b""

    def open(self) -> None:
        """Both sides are proven: messages pass."""
        self.stage = Stage.OPEN
        self._reader.opened = True
        if self._timer is not None:
            self._timer.cancel()

    # -- end

    def expire(self, seconds: float, reason: str) -> None:
        """End it after that time, unless it is `open` by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.end, reason)

    def finish(self, seconds: float, reason: str, *, plain: bytes = b"") -> None:
        """End it when what is queued, or else the `plain` bytes, has left and the other side has closed, or after
        `seconds`. Nothing is heard meanwhile."""
        if self.stage not in (Stage.FINISHING, Stage.ENDED):
            self.stage = Stage.FINISHING
            self._encrypted = memoryview(plain) if plain else self._encrypted
            self._owner.budget_free(self)
            self._loop.add_reader(self.socket, self._readable)
            self.expire(seconds, reason)
            self._flush()

    def end(self, reason: str, error: type[PeerUnreachable] = PeerUnreachable) -> None:
        """End it now; what is queued is dropped."""
        if self.stage is Stage.ENDED:
            return
        self.stage, self.error = Stage.ENDED, error
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        self.socket.close()
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self._loop.call_soon(self._owner.ended, self, reason)

    # -- out

    def say(self, said: greeting.Said) -> None:
        """Tell the other transport something."""
        self.send(frames.encode(Kind.CONTROL, greeting.encode(said)))

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if the queue is full. One to a link that ended is dropped."""
        if self.stage in (Stage.FINISHING, Stage.ENDED) or self._deaf:
            return True
        size = len(frame) + _MESSAGE_OVERHEAD
        if self._queued + size > QUEUE_BYTES:
            return False
        self._queue.append(memoryview(frame))
        self._queued += size
        self._large_out += len(frame) if len(frame) >= LARGE_BYTES else 0
        if not self._writing:
            self._flush()
        return True

    def _encrypt(self) -> None:
        """Take what the kernel gets next out of the queue."""
        while self._queue and self._outgoing.pending < _SEND_BYTES:
            written = self._tls.write(self._queue[0][:_SEND_BYTES])
            self._queued -= written
            self._queue[0] = self._queue[0][written:]
            if not self._queue[0]:
                self._queued -= _MESSAGE_OVERHEAD
                self._queue.popleft()
        self._encrypted = memoryview(self._outgoing.read())

    def _flush(self) -> None:
        try:
            for _ in range(_SENDS):
                if not self._encrypted:
                    self._encrypt()
                if not self._encrypted:
                    break
                number = self.socket.send(self._encrypted)
                self._taken += number
                self._encrypted = self._encrypted[number:]
        except BlockingIOError:
            pass
        except OSError:
            # What had come from it before is still to be read, and then its end.
            self._deaf, self._encrypted = True, memoryview(b"")
            self._queue.clear()
        wants = bool(self._encrypted or self._queue)
        if wants and not self._writing:
            self._loop.add_writer(self.socket, self._flush)
        elif self._writing and not wants:
            self._loop.remove_writer(self.socket)
        self._writing = wants
        if self.stage is Stage.FINISHING and not wants:
            with suppress(OSError):  # it has ended, which is read next
                self.socket.shutdown(socket.SHUT_WR)

    def moved(self) -> int:
        """See `Transport.moved`."""
        under_way = self._queued + len(self._encrypted) + max(0, self._taken - tcp.counts(self.socket)[0])
        return self._reader.large + max(0, self._large_out - under_way)

    # -- in

    def _readable(self) -> None:
        if self._more:
            return  # first what came before
        scratch = self._owner.scratch
        if self.stage in (Stage.SECURING, Stage.GREETING):
            scratch = scratch[: UNPROVEN_BYTES - self._received]
            if not scratch:
                return self.end(f"it sent {UNPROVEN_BYTES} bytes and has not proven who it is")
        try:
            if not self._received and not self.dialled and self.socket.recv(1, socket.MSG_PEEK) == greeting.LANE_BYTE:
                return self._owner.lane_came(self)
            number = self.socket.recv_into(scratch)
        except BlockingIOError:
            return
        except OSError as error:
            return self.end(f"its connection was lost: {error.strerror}")
        if not number:
            return self.end("its connection was lost")
        if self.stage is Stage.FINISHING:
            return
        if self._outgoing.pending > RECEIVE_BYTES:  # of answers to TLS's own messages, which it does not read
            return self.end("it takes no answers")
        if not self._received and scratch[: len(greeting.FIRST_VERSION)] == greeting.FIRST_VERSION:
            return self._owner.outdated(self)
        self._received += number
        self._incoming.write(scratch[:number])
        self._advance()

    def resume(self) -> None:
        """The memory that it waited for is there."""
        if self.stage is Stage.OPEN:
            self._loop.add_reader(self.socket, self._readable)
            self._handle(self._reader.allocate())
            self._advance()

    def _advance(self) -> None:
        """Do what can be done with what has come."""
        self._more = False
        try:
            if self.stage is Stage.SECURING:
                self._tls.do_handshake()
                self.stage = Stage.GREETING
                self._owner.secured(self)
            for _ in range(_BATCH):
                if self.stage not in (Stage.GREETING, Stage.OPEN) or not self._read():
                    return
            self._more = True
            self._loop.call_soon(self._advance)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._owner.broke(self, f"it does not speak TLS 1.3: {error.reason}")
        finally:
            if self.stage is not Stage.ENDED and self._outgoing.pending and not self._writing:
                self._flush()

    def _read(self) -> bool:
        """Decrypt the next piece of a message; False if there is none, or no room for it."""
        target = self._reader.target
        assert target is not None
        number = int(self._tls.read(len(target), target))  # typeshed says bytes
        if not number:
            self.end("its connection was lost")
            return False
        try:
            frame = self._reader.filled(number)
        except ValueError as error:
            self._owner.broke(self, str(error))
            return False
        self._handle(frame)
        if self._reader.target is None:
            if not self._owner.budget_take(self, self._reader.size):
                self._loop.remove_reader(self.socket)
                return False
            self._handle(self._reader.allocate())
        return True

    def _handle(self, frame: Frame | None) -> None:
        if frame is None:
            return
        if sum(map(len, frame.buffers), len(frame.header)) >= LARGE_BYTES:
            self._owner.budget_free(self)
        if frame.kind is Kind.MESSAGE:
            self._owner.received(self, frame)
        else:
            self._owner.heard(self, frame.header)
