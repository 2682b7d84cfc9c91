"""One ZeroMQ ROUTER on an asyncio loop: its connections, what arrives over them, and when each of them ends.

How ZeroMQ is driven. A socket's descriptor becomes readable when something *changed*, and any call on the socket may
consume that hint. So after each wake-up, and after each send, the socket is read until it has nothing more.

How a connection is known. ZeroMQ names a message's connection by a routing id, the monitor's events by the file
descriptor; `SRCFD` of a received frame joins the two. Descriptors are reused: the monitor is therefore read before a
routing id is joined to a descriptor, and a connection that ended is forgotten only when all that it brought is read.
ZeroMQ's threads race: that a connection was accepted may be told after its first message, and even after its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import ParamSpec

import zmq

from shoal.p2p import flood, tcp
from shoal.p2p.connection import Connection
from shoal.p2p.context import ZAP_DOMAIN
from shoal.p2p.forks import Sockets
from shoal.p2p.identity import Identity
from shoal.p2p.movement import LARGE_BYTES
from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_HEADER_BYTES

log = logging.getLogger(__name__)

SEND_QUEUE = 1024  # messages per connection
SEND_QUEUE_BYTES = 128 << 20  # per connection; more than a peer that keeps the rules can be owed
RECEIVE_QUEUE = 128  # messages per connection; then TCP holds up the sender
MAX_CONNECTIONS = 4096  # accepted ones
HELLO_TIMEOUT = 10.0  # seconds from accepting a connection to its first message
LINGER = 0.5  # seconds that what is queued has to leave when a socket is closed
KEEPALIVE_SECONDS = 2  # between two questions of the kernel over an idle connection
_CURVE_OVERHEAD = 64  # bytes, at most, that encryption adds to a frame
_NEVER = 10**9  # milliseconds (and more) until a reconnection, which is not wanted: by then the session is closed
_BATCH = 64  # messages handled in one go, before the loop may do something else
_EVENT = struct.Struct("=Hi")
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # plain integers: flags of an enum are slow
_READABLE = int(zmq.POLLIN)
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_monitors = count()

P = ParamSpec("P")
Frames = Sequence[zmq.Frame]


class Router:
    """A ROUTER socket with CURVE, either for accepting connections or for dialling, and its monitor.

    Args:
        context: of ZeroMQ.
        identity: whose keys encrypt.
        accepts: True to bind, False to dial.
        on_frames: called with each message, before which its connection is known.
        on_ended: called with a connection and the reason when it has ended and all that it brought was handed over.
        on_idle: called when everything that had arrived was handed over.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        identity: Identity,
        *,
        accepts: bool,
        on_frames: Callable[[Connection, Frames], None],
        on_ended: Callable[[Connection, str], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.accepts = accepts
        self._loop = asyncio.get_running_loop()
        self._on_frames, self._on_ended, self._on_idle = on_frames, on_ended, on_idle
        self._by_routing_id: dict[bytes, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._sockets = Sockets()  # for forked children
        self.dialled: dict[str, Connection] = {}
        self._early: dict[int, list[zmq.Frame]] = {}  # first messages of connections that were not announced yet
        self._gone: set[int] = set()  # descriptors of connections whose end was announced before their beginning
        self._over: set[int] = set()  # descriptors of connections that ended since the socket was last found empty
        self._ending: list[tuple[Connection, str]] = []
        self._scheduled = False
        self._next_number = count(1)

        self.socket = context.socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.SNDHWM: SEND_QUEUE,
            zmq.RCVHWM: RECEIVE_QUEUE,
            zmq.MAXMSGSIZE: max(MAX_BUFFER_BYTES, MAX_HEADER_BYTES) + _CURVE_OVERHEAD,
            # ZeroMQ's own heartbeats wait behind the frame that is being sent: on a slow line that is too long.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_SECONDS,
            zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_SECONDS,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.TCP_MAXRT: round(tcp.LEAST_PATIENCE * 1000),
            zmq.HANDSHAKE_IVL: round(HELLO_TIMEOUT * 1000),
            # With a maximum, the interval has no random part: see `connect`.
            zmq.RECONNECT_IVL_MAX: 2 * _NEVER,
            zmq.LINGER: round(LINGER * 1000),
        }
        for option, value in options.items():
            self.socket.set(option, value)
        public, secret = identity.curve_keys()
        self.socket.set(zmq.CURVE_SECRETKEY, secret)
        if accepts:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            self.socket.set(zmq.CURVE_PUBLICKEY, public)

        self._monitor_endpoint = f"inproc://shoal.monitor.{next(_monitors)}"
        self.socket.monitor(self._monitor_endpoint, _EVENTS | _HANDSHAKE_FAILED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.connect(self._monitor_endpoint)
        self._loop.add_reader(self.socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._look()
        self._read_monitor()  # a socket signals what arrives only after it was once found empty

    # -- making and ending connections

    def connect(self, endpoint: str, server_key: bytes, *, ipv6: bool) -> Connection:
        """Begin to dial; `on_ended` tells of a failure. Messages may be sent at once, they wait."""
        number = next(self._next_number)
        connection = Connection(self, endpoint, number.to_bytes(8, "big"), retry=_NEVER + number % _NEVER)
        # ZeroMQ takes each connection's settings from the socket at the time of connecting.
        # The interval is never -1: then a lost connection would take along what it brought and nobody has read.
        self.socket.set(zmq.RECONNECT_IVL, connection.retry)
        self.socket.set(zmq.IPV6, ipv6)
        self.socket.set(zmq.CURVE_SERVERKEY, server_key)
        self.socket.set(zmq.CONNECT_ROUTING_ID, connection.routing_id)
        self.socket.connect(endpoint)
        self._by_routing_id[connection.routing_id] = connection
        self.dialled[endpoint] = connection
        self._schedule()
        return connection

    def cut(self, connection: Connection, reason: str) -> None:
        """End a connection; what is queued to it is dropped. `on_ended` is called with `reason` when that is done."""
        if not connection.reason:
            connection.reason = reason
            self._shut_down(connection)

    def forget(self, connection: Connection) -> None:
        """End a dialled connection at once, whatever its state; what is queued to it or came from it is dropped."""
        connection.reason = connection.reason or "this side ended it"
        self._by_routing_id.pop(connection.routing_id, None)
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        if self.dialled.get(connection.endpoint) is connection:
            del self.dialled[connection.endpoint]
            self.socket.linger = 0
            with suppress(zmq.ZMQError):  # ZeroMQ may have given it up already
                self.socket.disconnect(connection.endpoint)
            self.socket.linger = round(LINGER * 1000)
        connection.muted = True
        if connection.greeted is not None:
            connection.greeted.cancel()  # others may wait for it
        if connection.timer is not None:
            connection.timer.cancel()

    def _shut_down(self, connection: Connection) -> None:
        """Shut down the TCP connection under ZeroMQ, which offers no way to end one that was accepted.

        Its number may be another file's by now. But ZeroMQ tells of a connection's end before it frees the number, so
        if nothing of an end has been told after we took a duplicate, the duplicate is of the right one.
        """
        try:
            duplicate = socket.socket(fileno=os.dup(connection.fd))
        except OSError:
            return  # not made yet, or closed
        with duplicate:
            self._read_monitor()
            if self._by_fd.get(connection.fd) is connection:
                with suppress(OSError):
                    duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and end all connections after at most LINGER seconds, without a call of `on_ended`."""
        self._next_look.cancel()
        for connection in self._by_fd.values():
            if connection.timer is not None:
                connection.timer.cancel()
        self.dialled.clear()
        self._by_fd.clear()
        self._loop.remove_reader(self.socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    # -- messages

    def send(self, connection: Connection, frames: Frames) -> bool:
        """Queue a message; False if the queue is full. One to a connection that ended is dropped."""
        if connection.reason:
            return True
        size = sum(len(frame) for frame in frames)
        connection.sent += size
        connection.large_out += size if size >= LARGE_BYTES else 0
        if connection.sent - connection.acked > SEND_QUEUE_BYTES and not self._has_room(connection):
            return False
        try:
            self.socket.send(connection.routing_id, _MORE)
            for frame in frames[:-1]:
                self.socket.send(frame, _MORE, copy=False)
            self.socket.send(frames[-1], _LAST, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # which means that it ended: the monitor tells
                raise
        finally:
            if int(self.socket.get(zmq.EVENTS)) & _READABLE:
                self._schedule()
        return True

    def _has_room(self, connection: Connection) -> bool:
        """Whether less than SEND_QUEUE_BYTES wait for the other side, by what it has acknowledged until now.

        What it acknowledged exceeds what it was sent by ZeroMQ's own bytes, so that much more may wait; whenever that
        is noticed, the count begins anew.
        """
        connection.acked = tcp.counts(connection.fd)[0]
        connection.sent = max(connection.sent, connection.acked)
        # A kernel that does not count says 0; a connection that was greeted has acknowledged something.
        return not connection.acked or connection.sent - connection.acked <= SEND_QUEUE_BYTES

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(_BATCH):
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(_LAST, copy=False)
            except zmq.Again:
                break
            self._guarded(self._received, frames)
        else:
            self._schedule()
            return
        ended, self._ending = self._ending, []
        self._over.clear()
        for connection, reason in ended:
            self._by_routing_id.pop(connection.routing_id, None)
            self._guarded(self._on_ended, connection, connection.reason or reason)
        self._read_monitor()
        # What ended after the socket was found empty may have left something in it.
        if not self._ending:
            self._guarded(self._on_idle)

    def _guarded(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it; an error is a defect of ours, which must not stop what else there is to do."""
        try:
            function(*args, **kwargs)
        except Exception:  # told with its traceback; the loop that serves all other connections goes on
            log.exception("handling what a connection brought failed")

    def _received(self, frames: list[zmq.Frame]) -> None:
        connection = self._by_routing_id.get(frames[0].bytes)
        if connection is None and self.accepts:
            self._first_of_accepted(frames)
        elif connection is not None and not connection.muted:
            if connection.fd < 0:
                self._connected(connection, int(frames[1].get(zmq.SRCFD)))
            connection.messages += 1
            size = sum(len(frame) for frame in frames)
            connection.large_in += size if size >= LARGE_BYTES else 0
            self._on_frames(connection, frames[1:])

    def _first_of_accepted(self, frames: list[zmq.Frame]) -> None:
        """A message of a connection that is known by its descriptor only, or not at all."""
        self._read_monitor()
        fd = int(frames[1].get(zmq.SRCFD))
        connection = self._by_fd.get(fd)
        if connection is None:
            if fd not in self._over:
                self._early.setdefault(fd, frames)
        elif connection.routing_id:
            # The first one ended unnoticed and its number was reused. Nobody can say which of the two is alive.
            connection.muted = True
            self.cut(connection, "its connection was lost")
        else:
            connection.routing_id = frames[0].bytes
            self._by_routing_id[connection.routing_id] = connection
            self._received(frames)

    def _look(self) -> None:
        for connection in list(self._by_fd.values()):
            tcp.set_patience(connection.fd)
            if connection.gauge.is_flooding(tcp.counts(connection.fd)[1], connection.messages):
                self.cut(connection, "it sent a message over its bound")
        self._next_look = self._loop.call_later(flood.INTERVAL, self._look)

    # -- events

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                event, endpoint = self._monitor.recv_multipart(_LAST)
            except zmq.Again:
                return
            number, value = _EVENT.unpack(event)
            if number == zmq.EVENT_LISTENING:
                self._sockets.add(value)
            elif number == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif number == zmq.EVENT_DISCONNECTED:
                self._disconnected(value)
            elif not self.accepts and (connection := self.dialled.get(endpoint.decode())) is not None:
                if number == zmq.EVENT_CONNECTED:
                    self._connected(connection, value)
                elif number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if connection.proven is not None and not connection.proven.done():
                        connection.proven.set_result(None)
                elif number & _HANDSHAKE_FAILED:
                    connection.failure = "somebody answers there who cannot prove to be that peer"
                elif number == zmq.EVENT_CONNECT_RETRIED and value == connection.retry:
                    self._end(connection, "nobody listens there")

    def _connected(self, connection: Connection, fd: int) -> None:
        if connection.fd < 0:
            connection.fd = fd
            self._by_fd[fd] = connection
            self._sockets.add(fd)

    def _accepted(self, fd: int) -> None:
        frames = self._early.pop(fd, None)
        if fd in self._gone:
            self._gone.remove(fd)
            return
        connection = self._by_fd[fd] = Connection(self, fd=fd)
        self._sockets.add(fd)
        if len(self._by_fd) > MAX_CONNECTIONS:
            log.warning("refused a connection: there are %d already", MAX_CONNECTIONS)
            self._loop.call_soon(self.cut, connection, "too many connections")
            return
        connection.timer = self._loop.call_later(HELLO_TIMEOUT, self.cut, connection, "it did not say hello")
        if frames is not None:
            self._received(frames)
            self._schedule()

    def _disconnected(self, fd: int) -> None:
        self._sockets.discard(fd)
        connection = self._by_fd.pop(fd, None)
        if connection is not None:
            self._over.add(fd)
            self._end(connection, "its connection was lost")
        elif self.accepts:
            self._gone.add(fd)

    def _end(self, connection: Connection, reason: str) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
        self._ending.append((connection, reason))
        self._schedule()
