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
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Protocol, TypeVar

from shoal.p2p import forks, frames, greeting, tcp
from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.frames import FrameKind
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Address
from shoal.p2p.outgoing import Outgoing
from shoal.p2p.release import RELEASE
from shoal.p2p.route import PeerRoute
from shoal.p2p.shared import Shared
from shoal.p2p.transport import LARGE_BYTES, Observation

log = logging.getLogger(__name__)

T = TypeVar("T")
Wait = Generator[None, None, T]

REFUSAL_TIME = 1.0  # seconds that a refused peer has to read the reason
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


class Greeting(IntEnum):
    """How far the greeting of a link has come. It goes on from each to the next, and from any to `KEPT`."""

    ASKED = auto()  # there is none: this side has dialled only to ask from which address the link comes
    BEGUN = auto()  # nobody has said anything
    CHALLENGED = auto()  # the listener has sent its challenge
    SAID_HELLO = auto()  # the dialler has said hello, so that the listener may keep the link
    KEPT = auto()  # the link is open, or another link to the same start of the peer stays; or the question is answered


class Succession(Enum):
    """Whether a link replaces another one, or is replaced."""

    NONE = auto()
    SUCCEEDING = auto()  # it is to replace another link; messages wait until that one is `EMPTIED`, then it is `NONE`
    EMPTIED = auto()  # the other side sends no more over it, because another link replaces it; so it stays


class LinkEvents(Protocol):
    """Receives the events of links. All methods are called on the loop's thread."""

    def secured(self, link: Link) -> None:
        """The TLS handshake is complete. Only control messages may pass until `Link.open` is called."""

    def heard(self, link: Link, payload: memoryview) -> None:
        """A control message of the other side's transport has arrived. Raises ValueError if the other side may not say
        that now.
        """

    def received(self, link: Link, header: memoryview, buffers: Sequence[memoryview]) -> None:
        """A message has arrived over an open link."""

    def token_came(self, link: Link, token: bytes) -> None:
        """The accepted connection is no link: it begins with the token of a lane or of a circuit."""

    def ended(self, link: Link, reason: str) -> None:
        """The link has ended. Called once, last, and never from within a call of the link's methods."""


class Link:
    """A connection, from its beginning to its end. Its life begins with `dial` or `take`.

    Args:
        events: receives the events.
        connection: a socket that does not block; only this link uses it.
        context: the TLS context.
        shared: the resources that this link shares with others.
        dialled: whether this side dials.

    Attributes:
        peer: the peer at the other end. If this side dialled, it is the peer that was dialled; if not, it is None until
            the other side has proven who it is.
        instance: identifies one start of that peer; b"" until it is known.
        nonce: the nonce that the dialler signs.
        route: the route by which this side has connected; None if there is none.
        relayed: whether the connection leads through a relay.
        outgoing: the bytes on their way to the kernel.
        observed: if this side has dialled to ask from which address the link comes: the answer.
    """

    def __init__(
        self, events: LinkEvents, connection: socket.socket, context: ssl.SSLContext, shared: Shared, *, dialled: bool
    ) -> None:
        self.socket = connection
        self.peer: PeerID | None = None
        self.instance = self.nonce = b""
        self.route: PeerRoute | None = None
        self.relayed = False
        self.observed: Observation | None = None
        self.stage, self.greeting, self.succession = Stage.CONNECTING, Greeting.BEGUN, Succession.NONE
        self._events, self._shared = events, shared
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Future[None] = self._loop.create_future()  # done when the greeting goes on
        self._incoming = ssl.MemoryBIO()
        self.outgoing = Outgoing(connection, shared.upload, self.end)
        self._tls = context.wrap_bio(self._incoming, self.outgoing.sealed, server_side=not dialled)
        self._received = 0  # bytes, encrypted
        self._large = 0  # bytes of large messages that have come, and that were queued
        self._passed = 0  # those of them that are known to have passed
        self._steps = 0
        self._timer = self._loop.call_later(PROOF_TIMEOUT, self.end, "it did not prove who it is in time")
        forks.close_in_children(connection)

    @property
    def dialled(self) -> bool:
        """Whether this side has dialled."""
        return not self._tls.server_side

    @property
    def address(self) -> Address:
        """The address of the other side."""
        address: Address = self.socket.getpeername()
        return address

    @property
    def certificate(self) -> bytes:
        """The other side's certificate, as DER."""
        return self._tls.getpeercert(binary_form=True) or b""

    # -- as the dialler

    def dial(self, peer: PeerID, to: Address | PeerRoute, *, asks: bool = False, succeeds: bool = False) -> None:
        """Connects to that peer.

        Args:
            peer: the peer.
            to: its address; or the route by which the socket is connected to it already.
            asks: whether only to ask from which address the link comes.
            succeeds: whether to replace another link.
        """
        self.peer = peer
        if isinstance(to, PeerRoute):
            self.route, self.relayed = to, to.relayed
        self.greeting = Greeting.ASKED if asks else Greeting.BEGUN
        self.succession = Succession.SUCCEEDING if succeeds else Succession.NONE
        self._start(self._connect(to))

    def _connect(self, to: Address | PeerRoute) -> Wait[bool]:
        number = 0 if isinstance(to, PeerRoute) else self.socket.connect_ex(to)
        if number == errno.EINPROGRESS:
            self._loop.add_writer(self.socket, self._go_on)
            yield
            self._loop.remove_writer(self.socket)
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.end("nobody listens there" if number == errno.ECONNREFUSED else os.strerror(number))
            return False
        self._prepare()
        return True

    async def until(self, wanted: Greeting) -> None:
        """Waits until the greeting has come that far. Only one task may wait. Raises the error with which the link has
        ended if it ends before.
        """
        while self.greeting < wanted:
            await self._turn

    def challenged(self, said: greeting.Challenge) -> None:
        """The listener has sent its challenge."""
        self.nonce = said.nonce
        if self.greeting is Greeting.ASKED:  # Without an instance, it is not one of the links of which one stays.
            return self.say(greeting.Observe())
        self.instance = said.instance
        self._go_to(Greeting.CHALLENGED)

    def answered(self, observed: Observation) -> None:
        """The listener has said from which address the link comes."""
        self.observed = observed
        self._go_to(Greeting.KEPT)

    def say_hello(self, instance: bytes, me: PeerID, signature: bytes) -> None:
        """Answers the challenge. `instance` identifies this start of this peer."""
        succeeds = self.succession is Succession.SUCCEEDING
        self.say(greeting.LinkHello(greeting.MAGIC, greeting.VERSION, instance, me.key, signature, succeeds, RELEASE))
        self._go_to(Greeting.SAID_HELLO)

    # -- as the listener

    def take(self, *, relayed: bool) -> None:
        """Listens to one that has dialled."""
        self.relayed = relayed
        self._start(self._look_for_token())

    def _look_for_token(self) -> Wait[bool]:
        self._prepare()
        first = yield from self._bytes(greeting.TOKEN_BYTES)
        if first[:1] not in (greeting.LANE_BYTE, greeting.CIRCUIT_BYTE):
            self._incoming.write(first)
            return True
        while len(first) < greeting.TOKEN_BYTES:
            first += yield from self._bytes(greeting.TOKEN_BYTES - len(first))
        self._events.token_came(self, first)
        return False

    def challenge(self, instance: bytes) -> None:
        """Asks the dialler who it is. `instance` identifies this start of this peer."""
        self.nonce = os.urandom(greeting.NONCE_BYTES)
        self.say(greeting.Challenge(greeting.MAGIC, greeting.VERSION, instance, self.nonce, RELEASE))
        self._go_to(Greeting.CHALLENGED)

    def proven(self, peer: PeerID, instance: bytes) -> None:
        """The dialler has said hello, and has proven who it is."""
        self.peer, self.instance = peer, instance
        self._go_to(Greeting.SAID_HELLO)

    def dismiss(self, said: greeting.Said, reason: str) -> None:
        """Says that as the last thing."""
        self.say(said)
        self.finish(REFUSAL_TIME, reason)

    # -- open, and replaced

    def open(self) -> None:
        """Both sides have proven their identity: messages may pass."""
        self.stage = Stage.OPEN
        self._timer.cancel()
        self._go_to(Greeting.KEPT)

    def succeed(self, old: Link) -> None:
        """Opens in place of `old`."""
        self.succession = Succession.NONE if old.succession is Succession.EMPTIED else Succession.SUCCEEDING
        self.open()

    def empty(self) -> None:
        """The other side sends no more over this link, because another one replaces it."""
        self.succession = Succession.EMPTIED

    def _go_to(self, greeting: Greeting) -> None:
        self.greeting = greeting
        self._wake()

    def _wake(self) -> None:
        turn, self._turn = self._turn, self._loop.create_future()
        if not turn.done():
            turn.set_result(None)

    # -- end

    def refuse(self, reason: str, answer: greeting.Said | None = None) -> None:
        """Ends the link because the other side may not have it. If that side has dialled, it is told the answer, or the
        reason.
        """
        if self.dialled:
            return self.end(reason, HandshakeFailed)
        log.info("refused a connection: %s", reason)
        self.dismiss(answer or greeting.Refusal(reason[: greeting.MAX_REASON]), reason)

    def give_way(self) -> None:
        """Ends the link because another one of the same start of the peer stays."""
        self._go_to(Greeting.KEPT)
        self.end("another link stays")

    def finish(self, seconds: float, reason: str) -> None:
        """Ends the link when all queued bytes are sent and the other side has closed, or after `seconds`. Bytes that
        arrive meanwhile are dropped."""
        if self.stage not in (Stage.FINISHING, Stage.ENDED):
            self.stage, self._life = Stage.FINISHING, self._drain()
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self.end, reason)
            self._loop.add_reader(self.socket, self._go_on)
            self.outgoing.finish()

    def end(self, reason: str, error: type[PeerUnreachable] = PeerUnreachable) -> None:
        """Ends the link now. Queued bytes are dropped."""
        if self.stage is not Stage.ENDED:
            self.stage = Stage.ENDED
            self._timer.cancel()
            self._loop.remove_reader(self.socket)
            self.outgoing.drop()
            self.socket.close()
            del self._life  # frees the part of a message that it holds
            self._loop.call_soon(self._events.ended, self, reason)
            self._wake()
            self._turn.set_exception(error(reason))
            self._turn.exception()  # otherwise asyncio would log it if nobody waits

    # -- out

    def say(self, said: greeting.Said) -> None:
        """Sends a control message to the other transport."""
        self.send(frames.encode(FrameKind.CONTROL, greeting.encode(said)))

    def send(self, frame: bytes) -> None:
        """Queues a frame. If the queue is full, the link ends. The frame is dropped if the TLS handshake is not
        complete, or the link has ended."""
        if self.stage in (Stage.GREETING, Stage.OPEN) and not self.outgoing.deaf:
            with suppress(ssl.SSLError):  # TLS has failed, which ends the link
                self._tls.write(frame)
            self._large += len(frame) if len(frame) >= LARGE_BYTES else 0
            self.outgoing.flush()

    def moved(self) -> int:
        """See `Transport.moved`."""
        # The bytes under way may be those of small messages, sent later. The count must never fall, because that would
        # mean another link.
        self._passed = max(self._passed, self._large - self.outgoing.under_way())
        return self._passed

    # -- in

    def resume(self) -> None:
        """Continues to read, unless the link has ended meanwhile."""
        if self.stage is not Stage.ENDED:
            self._loop.add_reader(self.socket, self._go_on)
            self._go_on()

    def release(self) -> None:
        """All messages over the link that this one replaces have come: those over this one may pass."""
        if self.succession is Succession.SUCCEEDING:
            self.succession = Succession.NONE
            self.resume()

    def _go_on(self) -> None:
        try:
            next(self._life)
        except ssl.SSLError as error:
            self._broke(f"it does not speak TLS 1.3: {error.reason}")
        except ValueError as error:
            self._broke(str(error))
        except OSError as error:
            self.end(f"its connection was lost: {error.strerror}")
        except StopIteration:
            pass
        except Exception:  # a bug: log the traceback; the generator is over, so the link is, too
            log.exception("a link failed")
            self.end("this side has failed")

    def _broke(self, reason: str) -> None:
        """The other side has sent what it may not send."""
        if self.stage is Stage.OPEN:
            self.end(f"it broke the rules: {reason}")
        else:
            self.refuse(reason)

    # The life of a link is a generator and not a task: a task needs one more turn of the loop for each message. The
    # generator yields until bytes have arrived, or until it is resumed.

    def _start(self, begin: Wait[bool]) -> None:
        self._life = self._run(begin)
        self._go_on()

    def _run(self, begin: Wait[bool]) -> Wait[None]:
        """Lives. `begin` returns whether there is a TCP connection for TLS."""
        if not (yield from begin):
            return
        yield from self._step(self._tls.do_handshake)
        self.stage = Stage.GREETING
        self._events.secured(self)
        while self.stage in (Stage.GREETING, Stage.OPEN):
            yield from self._hear()

    def _prepare(self) -> None:
        self.stage = Stage.SECURING
        tcp.prepare(self.socket)
        self._loop.add_reader(self.socket, self._go_on)

    def _hear(self) -> Wait[None]:
        """Receives a frame, each of its parts into memory of its own."""
        head = yield from self._read(frames.HEAD_BYTES)
        kind, sizes = frames.announced(head, opened=self.stage is Stage.OPEN)
        while kind is FrameKind.MESSAGE and self.succession is Succession.SUCCEEDING:
            self._loop.remove_reader(self.socket)
            yield
        large = sum(sizes) >= LARGE_BYTES
        while large and not self._shared.unfinished.take(self, sum(sizes), self.resume):
            self._loop.remove_reader(self.socket)
            yield
        parts = []
        for size in sizes:
            parts.append((yield from self._read(size, large=large)))
        if large:
            self._shared.unfinished.give(self)
        if kind is FrameKind.MESSAGE:
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
            self._large += number if large else 0
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
                if self.outgoing.sealed.pending:
                    self.outgoing.flush()
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
                data = self.socket.recv(min(most, self._shared.download.piece))
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "it was closed there")
        self._received += len(data)
        if wait := self._shared.download.charge(len(data), urgent=True):
            self._loop.remove_reader(self.socket)
            self._loop.call_later(wait, self.resume)
            yield
        if self._received == len(data) and data.startswith(greeting.FIRST_VERSION):
            self.outgoing.sealed.write(b"" if self.dialled else greeting.OUTDATED)
            raise ValueError(greeting.other_version(1))
        return data

    def _drain(self) -> Wait[None]:
        while True:
            yield from self._bytes(RECEIVE_BYTES)
