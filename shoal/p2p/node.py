"""A peer on the network: typed messages, requests with deadlines, and a book of known addresses."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from shoal.p2p.errors import (
    MessageTooLarge,
    Outrun,
    P2PError,
    PeerLost,
    PeerUnreachable,
    Refused,
    Unanswered,
    Unavailable,
)
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.race import first_to_succeed
from shoal.p2p.transport import AnotherHandler, Buffer, LostHandler, Movement, Transport

log = logging.getLogger(__name__)

MAX_SERVICE_NAME = 128
MAX_REASON = 1024
MAX_TIMEOUT = 3600.0
MAX_CALLS_PER_PEER = 512  # requests of one peer handled at a time
MAX_KNOWN_PEERS = 16384
MAX_ADDRESSES_PER_PEER = 8
DIAL_TIMEOUT = 10.0
MAX_EXTENSIONS = 20  # of a request's timeout, while large messages pass

_NOTICE, _REQUEST, _REPLY, _FAILURE = range(4)
# The errors of decoding bytes from the network. msgspec raises RecursionError for deep nesting.
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The header frame of every message. `call` links a reply to its request; `timeout` is that of the request, in
    seconds.
    """

    kind: Annotated[int, msgspec.Meta(ge=_NOTICE, le=_FAILURE)]
    service: Annotated[str, msgspec.Meta(max_length=MAX_SERVICE_NAME)]
    call: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT)]
    body: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why a message was refused. `judged` says whether its content was the reason, and `outrun` whether other messages
    may have been."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    judged: bool
    outrun: bool = False


_NO_MESSAGE = Envelope(_NOTICE, "", 0, 0.0, msgspec.Raw())
_envelopes, _failures = msgspec.msgpack.Decoder(Envelope), msgspec.msgpack.Decoder(Failure)
_encode = msgspec.msgpack.Encoder().encode
# If two threads of msgspec 0.22 use a type for the first time at the same moment, the process crashes: one decodes with
# a half-made description of the other.
_one_at_a_time = threading.Lock()


def _raw(message: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(_encode(message))


def _drop(answer: Awaitable[object]) -> None:
    if isinstance(answer, Coroutine):
        answer.close()  # otherwise Python warns that nobody awaited it


class Service:
    """A name and the message types that belong to it: `Service("dht", Ping | Find | Found)`.

    Args:
        name: at most 128 characters; unique on a node.
        messages: a msgspec struct type with a tag, or a union of such types: requests, replies and notices alike.
        undecodable: called with the sender and the reason if a message can't be decoded.
        admit: called with the sender of each message before decoding. Raises Refused to refuse a peer's messages.

    Raises:
        ValueError: if the name is too long.
    """

    def __init__(
        self,
        name: str,
        messages: Any,
        undecodable: Callable[[PeerID, str], None] = lambda peer, reason: None,
        admit: Callable[[PeerID], None] = lambda peer: None,
    ) -> None:
        if len(name) > MAX_SERVICE_NAME:
            raise ValueError(f"the service name {name!r} is longer than {MAX_SERVICE_NAME} characters")
        self.name = name
        with _one_at_a_time:
            self.decoder = msgspec.msgpack.Decoder(messages)
        self.undecodable, self.admit = undecodable, admit


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request: a message, and buffers beside it. `name` is as in `Transport.send`."""

    body: msgspec.Struct
    buffers: Sequence[Buffer] = ()
    name: bytes = b""


Answer = Reply | msgspec.Struct | None
Handler = Callable[[PeerID, Any, Sequence[memoryview]], Answer | Awaitable[Answer]]
Body = TypeVar("Body", bound=msgspec.Struct)


def _reply(peer: PeerID, service: Service, answer: Envelope, buffers: Sequence[memoryview]) -> Reply:
    if answer.kind == _FAILURE:
        raise _refusal(answer)
    try:
        return Reply(service.decoder.decode(answer.body), buffers)
    except _UNDECODABLE as error:
        raise P2PError(f"{peer!r} sent an invalid reply: {error}") from error


def _refusal(answer: Envelope) -> Refused:
    try:
        failure = _failures.decode(answer.body)
    except _UNDECODABLE as error:
        return Unavailable(f"an undecodable refusal: {error}")
    if failure.outrun:
        return Outrun(failure.reason)
    return (Refused if failure.judged else Unavailable)(failure.reason)


class Node:
    """Exchanges messages with other nodes over a `Transport`. It lives on one loop: call all methods on that loop's
    thread.

    A handler is `handler(peer, message, buffers)`. It returns the reply to a request, or a coroutine that returns it;
    for a notice it returns None. It raises `Refused(reason)` to decline either. The handlers for one peer's messages
    start in the order in which the messages came.

    Args:
        identity: this peer's identity.
        transport: carries the messages. Nobody else may use it.
    """

    def __init__(self, identity: Identity, transport: Transport) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.transport = transport
        self.addresses: list[Multiaddr] = []  # the addresses where this node listens
        self.bytes_sent = 0  # of buffers only, to other peers
        self.bytes_received = 0
        self.mates: set[PeerID] = set()  # other nodes that are the same peer as this one
        self.shared: dict[str, Any] = {}  # objects that several services of this node share, by name
        self._book: dict[PeerID, list[Multiaddr]] = {}
        self._services: dict[str, tuple[Service, Handler]] = {}
        self._calls: dict[tuple[PeerID, int], asyncio.Future[tuple[Envelope, Sequence[memoryview]]]] = {}
        self._next_call = 1
        self._heard: dict[PeerID, float] = {}  # when the last message of a connected peer came
        self._dialling: dict[PeerID, asyncio.Task[None]] = {}
        self._handling: dict[PeerID, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost_handlers: list[LostHandler] = []
        self.closed = False
        transport.start(self._on_message, self._on_lost)
        self.twins = transport.twins

    # -- addresses and connections

    async def listen(self, address: Multiaddr) -> Multiaddr:
        """Accept connections at `address`. Returns it with the port in use and this peer's id."""
        bound = await self.transport.listen(address)
        self.addresses.append(bound)
        return bound

    def learn(self, peer: PeerID, addresses: Iterable[Multiaddr]) -> None:
        """Remember where `peer` listens. Addresses with another peer id are ignored."""
        known = [a.with_peer(peer) for a in addresses if a.peer_id in (None, peer)][:MAX_ADDRESSES_PER_PEER]
        if known and peer != self.peer_id:
            self._book.pop(peer, None)
            self._book[peer] = known
            if len(self._book) > MAX_KNOWN_PEERS:
                del self._book[next(iter(self._book))]

    def known_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """The addresses where `peer` is known to listen; for this node itself, its own."""
        return self.addresses if peer == self.peer_id else self._book.get(peer, [])

    def is_connected(self, peer: PeerID) -> bool:
        """Whether a message to `peer` can be sent now. Always true for this node itself."""
        return self.transport.is_connected(peer) or peer == self.peer_id

    def heard(self, peer: PeerID) -> float:
        """When the last message of that peer came, on the loop's clock. Minus infinity if none has come since the peer
        was last lost.
        """
        return self._heard.get(peer, float("-inf"))

    async def connect(self, peer: PeerID, timeout: float = DIAL_TIMEOUT) -> None:
        """Connect to `peer`, unless it is connected, by dialling its known addresses a little apart.

        Args:
            peer: the peer.
            timeout: seconds to wait for a connection.

        Raises:
            PeerUnreachable: if nobody answers, also after `timeout` seconds. HandshakeFailed if another peer answers.
        """
        if self.closed:
            raise PeerUnreachable("this node is closed")
        if self.is_connected(peer):
            return
        task = self._dialling.get(peer)
        if task is None:
            task = self._dialling[peer] = self.spawn(self._dial(peer))
            task.add_done_callback(lambda _: self._dialling.pop(peer, None))
        # Several callers may wait for one dial; one that gives up must not end it for the others.
        await asyncio.wait([task], timeout=min(timeout, DIAL_TIMEOUT))
        if not task.done():
            raise PeerUnreachable(f"{peer!r} did not answer within {min(timeout, DIAL_TIMEOUT):g} s")
        if task.cancelled():
            raise PeerUnreachable("this node was closed")
        task.result()
        if not self.is_connected(peer):
            raise PeerUnreachable(f"{peer!r} was lost again at once")

    async def _dial(self, peer: PeerID) -> None:
        addresses = self.known_addresses(peer)
        if not addresses:
            raise PeerUnreachable(f"{peer!r} is not connected, and no address of it is known")
        # Through a relay only if the peer itself does not answer at once.
        addresses = sorted(addresses, key=lambda address: address.relay is not None)
        await first_to_succeed([partial(self._dial_address, address) for address in addresses])

    async def _dial_address(self, address: Multiaddr) -> None:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT / 2):
                await self.transport.dial(address)
        except TimeoutError:
            raise PeerUnreachable(f"{address} did not answer within {DIAL_TIMEOUT / 2:g} s") from None

    async def look_for_twin(self, address: Multiaddr) -> None:
        """Dial an address of this very peer. If another process with its identity answers, both log a warning
        (`Twins`).

        Raises PeerUnreachable in any case, whether somebody answers or not.
        """
        await self._dial_address(address.with_peer(self.peer_id))

    def on_lost(self, handler: LostHandler) -> Callable[[], None]:
        """Call `handler(peer, reason)` whenever a connected peer is lost. Returns a function that ends this."""
        self._lost_handlers.append(handler)
        return lambda: self._lost_handlers.remove(handler) if handler in self._lost_handlers else None

    def on_another(self, handler: AnotherHandler) -> Callable[[], None]:
        """Call `handler(dialled, found)` whenever another peer answers than the one that was dialled. Returns a
        function that ends this.
        """
        handlers = self.transport.another_handlers
        handlers.append(handler)
        return lambda: handlers.remove(handler) if handler in handlers else None

    def disconnect(self, peer: PeerID, reason: str) -> None:
        """End all connections to a peer that does not answer. The peer counts as lost, also for calls that wait for
        it.
        """
        self.transport.disconnect(peer)
        self._on_lost(peer, reason)

    # -- messages out

    def notify(
        self,
        peers: Sequence[PeerID],
        service: Service,
        message: msgspec.Struct,
        buffers: Sequence[Buffer] = (),
        name: bytes = b"",
    ) -> None:
        """Send `message` to each connected peer of `peers`, and expect no reply. When this returns, the caller may
        write to `buffers` again, except to one with a `name` (see `Transport.send`).
        """
        self._post(peers, Envelope(_NOTICE, service.name, 0, 0.0, _raw(message)), buffers, name)

    async def call(
        self, peer: PeerID, service: Service, message: msgspec.Struct, expect: type[Body], *, timeout: float
    ) -> Body:
        """Send a request and return its reply. Connects first if necessary.

        While large messages pass between the two peers, request and reply wait behind them. So the timeout then begins
        again, at most MAX_EXTENSIONS times.

        Args:
            peer: the receiver.
            service: the service of the message.
            message: the request.
            expect: the type of the reply.
            timeout: seconds to wait for the reply.

        Raises:
            Refused: with the other side's reason. Unavailable if it did not judge the message, Outrun if it came too
                late.
            PeerUnreachable: if no connection can be made.
            PeerLost: if the peer is lost meanwhile.
            TimeoutError: if no reply comes in time.
            P2PError: if the reply is not an `expect`.
        """
        body = (await self.call_for_buffers(peer, service, message, timeout=timeout)).body
        if not isinstance(body, expect):
            asked, got = type(message).__name__, type(body).__name__
            raise P2PError(f"{peer!r} answered {asked} with {got}, not {expect.__name__}")
        return body

    async def call_for_buffers(
        self, peer: PeerID, service: Service, message: msgspec.Struct, *, timeout: float, buffers: Sequence[Buffer] = ()
    ) -> Reply:
        """As `call`, with buffers beside the request, and for replies of several types or with buffers."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        if self.closed or not self.is_connected(peer):
            async with asyncio.timeout_at(until):
                await self.connect(peer)
        number, self._next_call = self._next_call, self._next_call + 1
        future = self._calls[peer, number] = loop.create_future()
        movement = Movement(self.transport.moved(peer))
        try:
            request = Envelope(_REQUEST, service.name, number, min(timeout, MAX_TIMEOUT), _raw(message))
            self._post([peer], request, buffers)
            for _ in range(MAX_EXTENSIONS):
                await asyncio.wait([future], timeout=until - loop.time())
                if future.done():
                    return _reply(peer, service, *future.result())
                if not movement.goes_on(self.transport.moved(peer)):
                    break
                until = loop.time() + timeout
            raise TimeoutError
        finally:
            del self._calls[peer, number]
            if not future.cancel():
                future.exception()  # it came at the moment when nobody waited any more

    def _post(
        self, peers: Sequence[PeerID], envelope: Envelope, buffers: Sequence[Buffer] = (), name: bytes = b""
    ) -> None:
        header = _encode(envelope)
        others = [peer for peer in peers if peer != self.peer_id]
        if others:
            self.bytes_sent += len(others) * sum(memoryview(buffer).nbytes for buffer in buffers)
            self.transport.send(others, header, buffers, name)
        if len(others) != len(peers):
            # A message to itself takes the same path as all others: it is encoded, checked, and never handled
            # re-entrantly.
            copies = [memoryview(bytes(buffer)) for buffer in buffers]
            asyncio.get_running_loop().call_soon(self._on_message, self.peer_id, memoryview(header), copies)

    # -- messages in

    def serve(self, service: Service, handler: Handler) -> None:
        """Handle the messages of `service` by `handler`. Raises ValueError if its name is taken on this node."""
        if service.name in self._services:
            raise ValueError(f"{service.name!r} is already served on this node: choose another name (prefix, run id)")
        self._services[service.name] = (service, handler)

    def stop_serving(self, service: Service) -> None:
        """Refuse the messages of `service` from now on. Another service that has its name stays."""
        if self._services.get(service.name, (None,))[0] is service:
            del self._services[service.name]

    def _on_message(self, peer: PeerID, header: memoryview, buffers: Sequence[memoryview]) -> None:
        if self.closed:
            return
        self.bytes_received += sum(buffer.nbytes for buffer in buffers)
        self._heard[peer] = asyncio.get_running_loop().time()
        try:
            envelope = _envelopes.decode(header)
        except _UNDECODABLE as error:
            return self._decline(peer, _NO_MESSAGE, Refused(f"not a message: {error}"))
        if envelope.kind in (_REPLY, _FAILURE):
            self._on_answer(peer, envelope, buffers)
        elif envelope.kind == _NOTICE and envelope.service not in self._services:
            # Nobody waits for an answer, and the notice may be for a run that this peer has just left.
            log.debug("dropped a notice of %r to the unknown service %r", peer, envelope.service)
        else:
            with self._declining(peer, envelope):
                self._handle(peer, envelope, buffers)

    def _handle(self, peer: PeerID, request: Envelope, buffers: Sequence[memoryview]) -> None:
        if request.service not in self._services:
            raise Unavailable(f"unknown service {request.service!r}")
        service, handler = self._services[request.service]
        service.admit(peer)
        try:
            message = service.decoder.decode(request.body)
        except _UNDECODABLE as error:
            reason = f"not a message of {request.service!r}: {error}"
            service.undecodable(peer, reason)
            raise Refused(reason) from error
        answer = handler(peer, message, buffers)
        if not isinstance(answer, Awaitable):
            self._answer(peer, request, answer)
        elif self._handling.get(peer, 0) < MAX_CALLS_PER_PEER:
            self._handling[peer] = self._handling.get(peer, 0) + 1
            task = self.spawn(self._handle_later(peer, request, answer))
            task.add_done_callback(partial(self._handled, peer, answer))
        else:
            _drop(answer)
            raise Unavailable(f"more than {MAX_CALLS_PER_PEER} requests at a time")

    async def _handle_later(self, peer: PeerID, request: Envelope, answer: Awaitable[Answer]) -> None:
        with self._declining(peer, request):
            async with asyncio.timeout(request.timeout or MAX_TIMEOUT):
                result = await answer
            self._answer(peer, request, result)

    def _handled(self, peer: PeerID, answer: Awaitable[Answer], _task: asyncio.Task[None]) -> None:
        _drop(answer)
        self._handling[peer] -= 1
        if not self._handling[peer]:
            del self._handling[peer]

    def _answer(self, peer: PeerID, request: Envelope, answer: Answer) -> None:
        if request.kind == _NOTICE:
            return
        if answer is None:
            raise Refused("this is a notice, not a request: it has no reply")
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        envelope = Envelope(_REPLY, request.service, request.call, 0.0, _raw(reply.body))
        self._post([peer], envelope, reply.buffers, reply.name)

    @contextmanager
    def _declining(self, peer: PeerID, request: Envelope) -> Iterator[None]:
        """Report errors within to the sender. They must end neither the connection nor the loop."""
        try:
            yield
        except Unanswered as error:
            log.debug("dropped a message of %r to %r: %s", peer, request.service, error)
        except Refused as error:
            self._decline(peer, request, error)
        except Exception as error:
            reason = f"could not be handled: {str(error) or 'deadline passed'}"
            if not isinstance(error, TimeoutError | P2PError) or isinstance(error, MessageTooLarge):  # a bug
                log.exception("handling a message of %r to %r failed", peer, request.service)
                reason = "internal error"
            self._decline(peer, request, Unavailable(reason))

    def _decline(self, peer: PeerID, request: Envelope, error: Refused) -> None:
        log.info("refused a message of %r to %r: %s", peer, request.service, error)
        judged, outrun = not isinstance(error, Unavailable), isinstance(error, Outrun)
        failure = Failure(str(error)[:MAX_REASON], judged, outrun)
        self._post([peer], Envelope(_FAILURE, request.service, request.call, 0.0, _raw(failure)))

    def _on_answer(self, peer: PeerID, answer: Envelope, buffers: Sequence[memoryview]) -> None:
        future = self._calls.get((peer, answer.call))
        if future is not None and not future.done():
            future.set_result((answer, buffers))
        elif future is None and answer.kind == _FAILURE:
            error = _refusal(answer)
            # A message that was not judged has usually come too late, for example for a run that was left.
            level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
            level = logging.INFO if isinstance(error, Outrun) else level
            log.log(level, "%r refused a message to %r: %s", peer, answer.service, error)

    def _on_lost(self, peer: PeerID, reason: str) -> None:
        self._heard.pop(peer, None)
        for (other, _), future in self._calls.items():
            if other == peer and not future.done():
                future.set_exception(PeerLost(f"{peer!r} was lost: {reason}"))
        for handler in list(self._lost_handlers):
            try:
                handler(peer, reason)
            except Exception:  # a bug in one handler must not keep the news from the others
                log.exception("handling the loss of %r failed", peer)

    # -- life

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task that belongs to this node: it is cancelled when the node closes, and its unexpected errors are
        logged.
        """
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        # whoever awaits the task gets these errors
        if error is not None and not isinstance(error, P2PError | TimeoutError):
            log.error("a task of %r failed", self.peer_id, exc_info=error)

    async def close(self) -> None:
        """Cancel everything under way, end all connections, and stop listening. A second call does nothing.

        Requests that wait for a reply end with PeerUnreachable.
        """
        if self.closed:
            return
        self.closed = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(PeerUnreachable("this node was closed"))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.transport.close()
