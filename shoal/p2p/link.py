"""One TCP connection between two peers, with TLS 1.3 inside, driven by the asyncio loop.

It uses a socket of its own instead of an asyncio transport. When a send fails, asyncio's transports drop bytes that
have arrived before. They also wait 30 s for the other side's goodbye.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from shoal.p2p import forks, frames, greeting, tcp
from shoal.p2p.budget import Budget
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.frames import Kind
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Address, Lane
from shoal.p2p.limit import Limit
from shoal.p2p.route import Route
from shoal.p2p.transport import LARGE_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
Wait = Generator[None, None, T]

QUEUE_BYTES = 128 << 20  # bytes that wait for one peer; more than this peer ever owes to one that follows the protocol
PROOF_TIMEOUT = 10.0  # seconds from a link's beginning until both sides must be proven
UNPROVEN_BYTES = 16 << 10  # bytes that may come before a link is open; a handshake and a hello take about 1 kB
RECEIVE_BYTES = 64 << 10  # at a time
_STEPS = 64  # TLS operations at a time, before the loop may do other work


class Stage(Enum):
    """The stages of a link. A link goes from each stage to the next, and from any stage to `ENDED`."""

    CONNECTING = auto()  # this side has dialled; TCP has not connected yet
    SECURING = auto()  # TCP has connected; the TLS handshake is under way
    GREETING = auto()  # the handshake is complete; only control messages of the two transports pass
    OPEN = auto()  # both sides have proven their identity; messages pass
    FINISHING = auto()  # `finish` was called; queued bytes are sent, incoming ones are dropped
    ENDED = auto()  # `end` was called, or the connection was lost


class LinkEvents(ABC):
    """Receives the events of links. All methods are called on the loop's thread."""

    @abstractmethod
    def secured(self, link: Link) -> None:
        """The TLS handshake is complete. Only control messages may pass until `Link.open` is called."""

    @abstractmethod
    def heard(self, link: Link, payload: memoryview) -> None:
        """A control message of the other side's transport has arrived.

        Raises:
            ValueError: if the other side may not say that now; `broke` is called then.
        """

    @abstractmethod
    def received(self, link: Link, header: memoryview, buffers: Sequence[memoryview]) -> None:
        """A message has arrived over an open link."""

    @abstractmethod
    def broke(self, link: Link, reason: str) -> None:
        """The other side has sent what it may not send. The link goes on until somebody ends it."""

    @abstractmethod
    def lane_came(self, link: Link, token: bytes) -> None:
        """The accepted connection is no link: it begins with the token of a lane."""

    @abstractmethod
    def circuit_came(self, link: Link, token: bytes) -> None:
        """The accepted connection is no link: it begins with the token of a circuit."""

    @abstractmethod
    def ended(self, link: Link, reason: str) -> None:
        """The link has ended. Called once, last, and never from within a call of the link's methods."""


class Link:
    """A connection, from its beginning to its end.

    Args:
        events: receives the events.
        connection: a socket that does not block; only this link uses it.
        context: the TLS context.
        address: the address that this side dials; None if the other side has dialled, or there is a route.
        route: the route by which this side has connected; None if there is none.
        relayed: whether the connection leads through a relay.
        limits: the limits of upload and download that this link shares with others.
        budget: the memory for large messages that this link shares with others.

    Attributes:
        peer: the peer at the other end. If this side dialled, it is the peer that was dialled; if not, it is None until
            the other side has proven who it is.
        instance: identifies one start of that peer; b"" until it is known.
        nonce: the nonce that the dialler signs.
        certificate: if this side dialled: the other side's certificate, as DER.
        challenged: if this side dialled: done when the listener has sent its challenge.
        outcome: if this side dialled: done when messages can pass, or never will.
        said_hello: if this side dialled: whether it has said hello, so that the listener may keep the link.
        succeeds: if this side dialled: whether the link is to replace another one.
        succeeded: whether another link has replaced this one, so that this one is about to end.
        emptied: whether the other side sends no more over this link, because another one replaces it.
        held: whether incoming messages wait until `release`.
        asks: if this side dialled: whether the link only asks from which address it comes, and then ends.
        observed: the answer to that question.
        error: if this side dialled: the type of the error that the dialler gets when the link has ended.
        lane: the lane beside this link, if there is one.
        keys: the keys with which this side seals what it sends, one for each connection of the lane.
        dialled_lanes: if this side dialled: the number of keys in use.
        more: if this side dialled: the number of connections to dial when the first has opened.
        asked: the other side's keys for connections of the lane that it may not dial yet, and the address from which it
            will dial each.
    """

    def __init__(
        self,
        events: LinkEvents,
        connection: socket.socket,
        context: ssl.SSLContext,
        address: Address | None,
        route: Route | None,
        relayed: bool,
        limits: tuple[Limit, Limit],
        budget: Budget[Link],
    ) -> None:
        self.socket = connection
        self.dialled = address is not None or route is not None
        self.route, self.relayed = route, relayed
        self.peer: PeerID | None = None
        self.instance = self.nonce = self.certificate = b""
        self.said_hello = self.succeeds = self.succeeded = self.emptied = self.held = self.asks = False
        self.observed: greeting.Observed | None = None
        self.error: type[PeerUnreachable] = PeerUnreachable
        self.lane: Lane | None = None
        self.keys: list[bytes] = []
        self.dialled_lanes = self.more = 0
        self.asked: list[tuple[greeting.Key, str]] = []
        self.stage = Stage.CONNECTING
        self._events = events
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self.challenged: asyncio.Future[None] = self._loop.create_future()
        self.outcome: asyncio.Future[None] = self._loop.create_future()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not self.dialled)
        self._received = 0  # bytes, encrypted
        self._sealed = 0  # encrypted bytes that were queued
        self._unsent = bytearray()  # those of them that the kernel has not taken
        self._sent_at = self._loop.time()  # when the kernel last took bytes
        self._deaf = False  # sending has failed: the other side receives no more
        self._upload, self._download = limits
        self._paying = False  # whether it waits because of the upload limit
        self._large_in = self._large_out = 0  # bytes of large messages that have come, and that were queued
        self._passed = 0  # those of them that are known to have passed
        self._steps = 0
        self._writes = False  # whether the loop watches for room in the kernel
        self._timer = self._loop.call_later(PROOF_TIMEOUT, self.end, "it did not prove who it is in time")
        forks.close_in_children(connection)
        self._life = self._run(address)
        self._go_on()

    @property
    def address(self) -> Address:
        """The address of the other side."""
        address: Address = self.socket.getpeername()
        return address

    def open(self) -> None:
        """Both sides have proven their identity: messages may pass."""
        self.stage = Stage.OPEN
        self._timer.cancel()

    # -- end

    def finish(self, seconds: float, reason: str) -> None:
        """Ends the link when all queued bytes are sent and the other side has closed, or after `seconds`. Bytes that
        arrive meanwhile are dropped."""
        if self.stage not in (Stage.FINISHING, Stage.ENDED):
            self.stage, self._life = Stage.FINISHING, self._drain()
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self.end, reason)
            self._loop.add_reader(self.socket, self._go_on)
            self._flush()

    def end(self, reason: str, error: type[PeerUnreachable] = PeerUnreachable) -> None:
        """Ends the link now. Queued bytes are dropped."""
        if self.stage is not Stage.ENDED:
            self.stage, self.error = Stage.ENDED, error
            self._timer.cancel()
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self.socket.close()
            self._unsent.clear()
            del self._life  # frees the part of a message that it holds
            self._loop.call_soon(self._events.ended, self, reason)

    # -- out

    def say(self, said: greeting.Said) -> None:
        """Sends a control message to the other transport."""
        self.send(frames.encode(Kind.CONTROL, greeting.encode(said)))

    def send(self, frame: bytes) -> None:
        """Queues a frame. If the queue is full, the link ends. The frame is dropped if the TLS handshake is not
        complete, or the link has ended."""
        if self.stage in (Stage.GREETING, Stage.OPEN) and not self._deaf:
            with suppress(ssl.SSLError):  # TLS has failed, which ends the link
                self._tls.write(frame)
            self._large_out += len(frame) if len(frame) >= LARGE_BYTES else 0
            self._flush()

    def _flush(self) -> None:
        """Gives the kernel as many bytes as it has room for."""
        sealed = self._outgoing.read()
        self._sealed += len(sealed)
        self._unsent += sealed
        if len(self._unsent) > QUEUE_BYTES:
            return self.end("its queue is full")
        try:
            if self._unsent and not self._paying:
                # Both views are released here, even if a profiler in another thread holds on to them.
                with memoryview(self._unsent) as unsent, unsent[: self._upload.piece] as piece:
                    number = self.socket.send(piece)
                del self._unsent[:number]
                self._sent_at = self._loop.time()
                if wait := self._upload.charge(number, urgent=True):
                    self._paying = True
                    self._loop.call_later(wait, self._paid)
        except BlockingIOError:
            pass
        except OSError:
            # Bytes that arrived before must still be read, and then the end of the connection.
            self._deaf = True
            self._unsent.clear()
        if self._unsent and not self._paying:
            self._writes = True
            return self._loop.add_writer(self.socket, self._flush)
        if self._writes:
            self._writes = False
            self._loop.remove_writer(self.socket)
        if not self._unsent and self.stage is Stage.FINISHING:
            with suppress(OSError):  # it has ended; the next read finds that
                self.socket.shutdown(socket.SHUT_WR)

    def _paid(self) -> None:
        self._paying = False
        if self.stage is not Stage.ENDED:
            self._flush()

    def queued(self, seconds: float = 0.0) -> int:
        """The number of queued bytes, if the kernel has taken none of them for `seconds`; else 0."""
        return len(self._unsent) if self._loop.time() - self._sent_at >= seconds else 0

    def moved(self) -> int:
        """See `Transport.moved`."""
        under_way = max(0, self._sealed - tcp.counts(self.socket)[0])
        # The bytes under way may be those of small messages, sent later. The count must never fall, because that would
        # mean another link.
        self._passed = max(self._passed, self._large_in + self._large_out - under_way)
        return self._passed

    # -- in

    def resume(self) -> None:
        """Continues to read, unless the link has ended meanwhile."""
        if self.stage is not Stage.ENDED:
            self._loop.add_reader(self.socket, self._go_on)
            self._go_on()

    def release(self) -> None:
        """Let incoming messages pass again."""
        self.held = False
        self.resume()

    def _go_on(self) -> None:
        try:
            next(self._life)
        except ssl.SSLError as error:
            self._events.broke(self, f"it does not speak TLS 1.3: {error.reason}")
        except ValueError as error:
            self._events.broke(self, str(error))
        except OSError as error:
            self.end(f"its connection was lost: {error.strerror}")
        except StopIteration:
            pass
        except Exception:  # a bug: log the traceback; the generator is over, so the link is, too
            log.exception("a link failed")
            self.end("this side has failed")

    # The life of a link is a generator and not a task: a task needs one more turn of the loop for each message. The
    # generator yields until bytes have arrived, or until it is resumed.

    def _run(self, address: Address | None) -> Wait[None]:
        if address is not None:
            number = self.socket.connect_ex(address)
            if number == errno.EINPROGRESS:
                self._loop.add_writer(self.socket, self._go_on)
                yield
                self._loop.remove_writer(self.socket)
                number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                return self.end("nobody listens there" if number == errno.ECONNREFUSED else os.strerror(number))
        self.stage = Stage.SECURING
        tcp.prepare(self.socket)
        self._loop.add_reader(self.socket, self._go_on)
        first = b""
        with_token = greeting.LANE_BYTE, greeting.CIRCUIT_BYTE
        while not self.dialled and len(first) < (greeting.TOKEN_BYTES if first[:1] in with_token else 1):
            first += yield from self._bytes(greeting.TOKEN_BYTES - len(first))
        match first[:1]:
            case greeting.LANE_BYTE:
                return self._events.lane_came(self, first)
            case greeting.CIRCUIT_BYTE:
                return self._events.circuit_came(self, first)
        self._incoming.write(first)
        yield from self._step(self._tls.do_handshake)
        self.stage = Stage.GREETING
        self.certificate = self._tls.getpeercert(binary_form=True) or b""
        self._events.secured(self)
        while self.stage in (Stage.GREETING, Stage.OPEN):
            yield from self._hear()

    def _hear(self) -> Wait[None]:
        """Receives a frame, each of its parts into memory of its own."""
        head = yield from self._read(frames.HEAD_BYTES)
        kind, sizes = frames.announced(head, opened=self.stage is Stage.OPEN)
        while self.held and kind is Kind.MESSAGE:
            self._loop.remove_reader(self.socket)
            yield
        large = sum(sizes) >= LARGE_BYTES
        while large and not self._budget.take(self, sum(sizes), self.resume):
            self._loop.remove_reader(self.socket)
            yield
        parts = []
        for size in sizes:
            parts.append((yield from self._read(size, large=large)))
        if large:
            self._budget.give(self)
        if kind is Kind.MESSAGE:
            self._events.received(self, parts[0], parts[1:])
        else:
            self._events.heard(self, parts[0])

    def _read(self, size: int, *, large: bool = False) -> Wait[memoryview]:
        whole = rest = memoryview(bytearray(size))
        while rest:
            # without these bytes, TLS would only ask for more
            if not self._incoming.pending and not self._tls.pending():
                yield from self._receive()
            number = int((yield from self._step(partial(self._tls.read, len(rest), rest))))  # typeshed says bytes
            if not number:
                raise ConnectionResetError(errno.ECONNRESET, "TLS has ended")
            rest = rest[number:]
            self._large_in += number if large else 0
        return whole

    def _step(self, step: Callable[[], T]) -> Wait[T]:
        """Calls a TLS function, again whenever bytes have arrived that it needs."""
        while True:
            self._steps += 1
            if not self._steps % _STEPS:
                self._loop.call_soon(self.resume)
                yield
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                if self._outgoing.pending:
                    self._flush()
            yield from self._receive()

    def _receive(self) -> Wait[None]:
        """Gives TLS the next bytes that arrive."""
        most = RECEIVE_BYTES if self.stage is Stage.OPEN else UNPROVEN_BYTES - self._received
        if not most:
            raise ValueError(f"it sent {UNPROVEN_BYTES} bytes and has not proven who it is")
        self._incoming.write((yield from self._bytes(most)))

    def _bytes(self, most: int) -> Wait[bytes]:
        data = b""
        while not data:
            yield
            with suppress(BlockingIOError):
                data = self.socket.recv(min(most, self._download.piece))
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it was closed there")
        self._received += len(data)
        if wait := self._download.charge(len(data), urgent=True):
            self._loop.remove_reader(self.socket)
            self._loop.call_later(wait, self.resume)
            yield
        if self._received == len(data) and data.startswith(greeting.FIRST_VERSION):
            self._unsent += b"" if self.dialled else greeting.OUTDATED
            raise ValueError(greeting.other_version(1))
        return data

    def _drain(self) -> Wait[None]:
        while True:
            yield from self._bytes(RECEIVE_BYTES)
