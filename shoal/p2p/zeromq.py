"""The transport over TCP: ZeroMQ with CURVE encryption, both sides authenticated."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from weakref import WeakValueDictionary

import zmq

from shoal.p2p import greeting
from shoal.p2p.connection import Connection
from shoal.p2p.context import SharedContext
from shoal.p2p.errors import HandshakeFailed, MessageTooLarge, PeerUnreachable
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.race import first_to_succeed
from shoal.p2p.router import Frames, Router
from shoal.p2p.transport import Buffer, Transport, check_size

log = logging.getLogger(__name__)

REFUSAL_TIME = 1.0  # seconds that a refused peer has to read why
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class ZeroMQTransport(Transport):
    """Connections over TCP. One ROUTER socket accepts connections, another one dials; both are driven by the loop.

    The dialled peer is proven by CURVE (its key is derived from the peer id that is dialled), the dialling one by ZAP
    (`SharedContext`): the peer id that it claims in its hello must have the key that it proved to own. Two peers that
    dial each other at once have two connections; when either is lost, both are ended and the peer is reported lost,
    because messages may have been lost with it.

    Heartbeats are answered by ZeroMQ's own threads: they tell of a machine or a network that is gone, not of a process
    whose Python hangs.

    Args:
        identity: who this peer is.
        heartbeat_seconds: between heartbeats over an idle connection; it counts as lost when three were missed.
    """

    def __init__(self, identity: Identity, heartbeat_seconds: float = 2.0) -> None:
        if not 0.01 <= heartbeat_seconds <= 600:
            raise ValueError(f"heartbeat_seconds is {heartbeat_seconds}, not within 0.01 and 600")
        self.identity = identity
        self.peer_id = identity.peer_id
        self.heartbeat_seconds = heartbeat_seconds
        self._instance = os.urandom(greeting.INSTANCE_BYTES)
        self._peers: dict[PeerID, list[Connection]] = {}
        self._greeting: WeakValueDictionary[PeerID, asyncio.Lock] = WeakValueDictionary()
        self._hellos: dict[Connection, Frames] = {}  # of accepted connections, not looked at yet
        self._shared: SharedContext | None = None
        self._listener: Router | None = None
        self._dialler: Router | None = None
        self._closed = False

    # -- connections

    async def listen(self, address: Multiaddr) -> Multiaddr:
        ip = (await self._resolve(address))[0]
        if self._closed:
            raise RuntimeError("this transport is closed")
        if self._listener is None:
            self._listener = self._router(accepts=True)
        self._listener.socket.set(zmq.IPV6, ip.version == 6)
        try:
            self._listener.socket.bind(_endpoint(ip, address.port))
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"can't listen at {address}: {error.strerror}") from error
        bound = self._listener.socket.get_string(zmq.LAST_ENDPOINT)
        return address.with_port(int(bound.rpartition(":")[2])).with_peer(self.peer_id)

    async def dial(self, address: Multiaddr) -> None:
        peer = address.peer_id
        if peer is None:
            raise ValueError(f"{address} does not say whom to expect: it must end in /p2p/<peer id>")
        if peer == self.peer_id:
            raise PeerUnreachable(f"{address} is this peer itself")
        try:
            server_key = peer.curve_key()
        except ValueError as error:
            raise HandshakeFailed(f"nobody can be {peer}: {error}") from error
        try:
            found = await self._resolve(address)
        except OSError as error:
            raise PeerUnreachable(f"{address}: {error}") from error
        if self.is_connected(peer):
            return
        await first_to_succeed(
            [partial(self._dial, peer, server_key, _endpoint(ip, address.port), ip.version == 6) for ip in found]
        )

    async def _dial(self, peer: PeerID, server_key: bytes, endpoint: str, ipv6: bool) -> None:
        if self._closed:
            raise PeerUnreachable("this transport is closed")
        if self._dialler is None:
            self._dialler = self._router(accepts=False)
        while (other := self._dialler.dialled.get(endpoint)) is not None:
            # ZeroMQ knows a dialled connection by its endpoint, so there is one at a time.
            if other.greeted is None or other.greeted.done():
                raise HandshakeFailed(f"{endpoint} is the address of {other.peer!r}, which is connected")
            await asyncio.wait([other.greeted])
            if self.is_connected(peer):
                return
        try:
            connection = self._dialler.connect(endpoint, server_key, ipv6=ipv6)
        except zmq.ZMQError as error:
            raise PeerUnreachable(f"{endpoint} can't be dialled: {error.strerror}") from error
        connection.proven = asyncio.get_running_loop().create_future()
        connection.greeted = asyncio.get_running_loop().create_future()
        connection.peer = peer
        try:
            await self._greet(self._dialler, connection, connection.greeted)
        except BaseException:  # cancelled, too
            # A caller may give up in the very moment in which the connection is made: then it stays.
            if connection not in self._peers.get(peer, ()):
                self._dialler.forget(connection)
            raise

    async def _greet(self, dialler: Router, connection: Connection, greeted: asyncio.Future[None]) -> None:
        """Say hello over a dialled connection, once it is there, and wait for the answer.

        A peer that is dialled at several addresses hears one hello at a time: a second one would tell it that this side
        has lost the first connection.
        """
        assert connection.peer is not None
        assert connection.proven is not None
        await asyncio.wait([connection.proven, greeted], return_when=asyncio.FIRST_COMPLETED)
        async with self._greeting.setdefault(connection.peer, asyncio.Lock()):
            if self.is_connected(connection.peer) and not greeted.done():
                return dialler.forget(connection)
            dialler.send(connection, [greeting.hello(self.peer_id, self._instance)])
            await greeted

    def is_connected(self, peer: PeerID) -> bool:
        return peer in self._peers

    def disconnect(self, peer: PeerID) -> None:
        for connection in self._peers.pop(peer, ()):
            self._drop(connection, "this side disconnected")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for router in (self._dialler, self._listener):
            if router is not None:
                for connection in list(router.dialled.values()):
                    if connection.greeted is not None and not connection.greeted.done():
                        self._fail(connection, PeerUnreachable("this transport was closed"))
                        router.forget(connection)
                router.close()
        self._peers.clear()
        self._hellos.clear()
        if self._shared is not None:
            await self._shared.release()

    # -- messages

    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = ()) -> None:
        check_size(header, buffers)
        reached = [connections for peer in peers if (connections := self._peers.get(peer))]
        if not reached:
            return
        # The one copy. The frames are then shared by all recipients, and freed by ZeroMQ after the last of them.
        frames = [zmq.Frame(part, copy=True) for part in (header, *buffers)]
        for connections in reached:
            if not connections[0].router.send(connections[0], frames):
                for connection in connections:
                    connection.router.cut(connection, "its queue is full")

    def _on_frames(self, connection: Connection, frames: Frames) -> None:
        connections = self._peers.get(connection.peer) if connection.peer else None
        if connection.peer and connections and connection in connections:
            header, *buffers = (frame.buffer for frame in frames)
            try:
                check_size(header, buffers)
            except MessageTooLarge as error:
                connection.muted = True
                return connection.router.cut(connection, f"it broke the bounds: {error}")
            self._on_message(connection.peer, header, buffers)
        elif connection.greeted is not None:
            self._on_welcome(connection, frames)
        elif connection not in self._hellos:
            # Looked at when idle: then all that came from an earlier connection of the same peer has been handled.
            self._hellos[connection] = frames
        else:
            del self._hellos[connection]
            self._refuse(connection, "a message came before the hello was answered")

    def _on_ended(self, connection: Connection, reason: str) -> None:
        self._hellos.pop(connection, None)
        if connection.greeted is not None and not connection.greeted.done():
            self._fail(
                connection,
                HandshakeFailed(f"{connection.endpoint}: {connection.failure}")
                if connection.failure
                else PeerUnreachable(f"{connection.endpoint}: {reason}"),
            )
        elif connection.peer is not None and connection in self._peers.get(connection.peer, ()):
            self._lose(connection.peer, reason)

    def _on_idle(self) -> None:
        hellos, self._hellos = self._hellos, {}
        for connection, frames in hellos.items():
            self._on_hello(connection, frames)

    # -- greetings

    def _on_hello(self, connection: Connection, frames: Frames) -> None:
        """The first message of an accepted connection."""
        try:
            hello = greeting.parse(frames)
        except ValueError as error:
            return self._refuse(connection, str(error))
        peer = PeerID(hello.peer)
        try:
            proven = peer.curve_key().hex() == frames[0].get("User-Id")
        except ValueError:
            proven = False
        if not proven:
            return self._refuse(connection, f"the key of this connection is not that of {peer}")
        if peer == self.peer_id:
            return self._refuse(connection, f"{peer} is this peer itself: do two processes use one identity?")
        earlier = self._peers.get(peer, [])
        if any(other.router.accepts or other.instance != hello.instance for other in earlier):
            self._lose(peer, "it connected anew")
        if not connection.router.send(connection, [greeting.hello(self.peer_id, self._instance)]):
            return
        connection.instance = hello.instance
        self._establish(connection, peer)

    def _on_welcome(self, connection: Connection, frames: Frames) -> None:
        """The first message of a dialled connection."""
        assert connection.peer is not None
        if connection.greeted is None or connection.greeted.done():
            return
        try:
            hello = greeting.parse(frames)
        except ValueError as error:
            return self._fail(connection, HandshakeFailed(f"{connection.endpoint}: {error}"))
        if hello.peer != connection.peer.key:
            self._fail(connection, HandshakeFailed(f"{connection.endpoint}: its hello names another peer"))
        else:
            earlier = self._peers.get(connection.peer, [])
            if any(other.instance != hello.instance for other in earlier):
                self._lose(connection.peer, "it was started anew")
            connection.instance = hello.instance
            connection.greeted.set_result(None)
            self._establish(connection, connection.peer)

    def _establish(self, connection: Connection, peer: PeerID) -> None:
        connection.peer = peer
        if connection.timer is not None:
            connection.timer.cancel()
        self._peers.setdefault(peer, []).append(connection)

    def _refuse(self, connection: Connection, reason: str) -> None:
        log.info("refused a connection: %s", reason)
        connection.muted = True
        connection.router.send(connection, [greeting.refusal(reason)])
        if connection.timer is not None:
            connection.timer.cancel()
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(REFUSAL_TIME, connection.router.cut, connection, reason)

    # -- ends

    def _fail(self, connection: Connection, error: PeerUnreachable) -> None:
        if connection.greeted is not None and not connection.greeted.done():
            connection.greeted.set_exception(error)

    def _drop(self, connection: Connection, reason: str) -> None:
        """End a connection of which nothing more is to be heard."""
        connection.muted = True
        if connection.router.accepts:
            connection.router.cut(connection, reason)
        else:
            connection.router.forget(connection)

    def _lose(self, peer: PeerID, reason: str) -> None:
        for connection in self._peers.pop(peer):
            self._drop(connection, reason)
        self._on_lost(peer, reason)

    # -- sockets

    def _router(self, *, accepts: bool) -> Router:
        if self._shared is None:
            self._shared = SharedContext.acquire()
        return Router(
            self._shared.context,
            self.identity,
            accepts=accepts,
            heartbeat_seconds=self.heartbeat_seconds,
            on_frames=self._on_frames,
            on_ended=self._on_ended,
            on_idle=self._on_idle,
        )

    async def _resolve(self, address: Multiaddr) -> list[IPAddress]:
        """The numeric addresses of a host; OSError if it has none. Asked here: ZeroMQ would block a thread on it."""
        if address.protocol in ("ip4", "ip6"):
            return [ipaddress.ip_address(address.host)]
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, family=_FAMILIES[address.protocol], type=socket.SOCK_STREAM
        )
        return list(dict.fromkeys(ipaddress.ip_address(where[0]) for *_, where in found))


def _endpoint(ip: IPAddress, port: int) -> str:
    return f"tcp://[{ip.compressed}]:{port}" if ip.version == 6 else f"tcp://{ip.compressed}:{port}"
