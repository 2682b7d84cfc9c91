"""The transport over TCP: ZeroMQ with CURVE encryption, both sides authenticated."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
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
ALIVE_TIMEOUT = 3.0  # seconds that a connected peer has to show that it lives, when another says to be the same one
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}

_TAKEN = "another process with the same identity is connected already"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class _Rival:
    """Who says to be a peer of which another start is connected.

    Attributes:
        connection: its connection; it waits for an answer to its hello, or to be told that it is welcome.
        instance: which start it is.
        timer: after which the connected one counts as lost.
    """

    connection: Connection
    instance: bytes
    timer: asyncio.TimerHandle


class ZeroMQTransport(Transport):
    """Connections over TCP. One ROUTER socket accepts connections, another one dials; both are driven by the loop.

    The dialled peer is proven by CURVE (its key is derived from the peer id that is dialled), the dialling one by ZAP
    (`SharedContext`): the peer id that it claims in its hello must have the key that it proved to own. Two peers that
    dial each other at once have two connections; when either is lost, both are ended and the peer is reported lost,
    because messages may have been lost with it.

    Of two processes with one identity, the first stays connected. When another start of a connected peer says hello,
    the connected one is asked whether it lives (`greeting.Taken`), and the other waits. If it answers within 3 s, both
    use one identity at the same time: the other is refused. If its connection ends or it is silent, it was started
    anew: it is lost, and the other takes its place.

    The kernel asks after the other side (`router.KEEPALIVE_SECONDS`), so a machine or a network that is gone is
    noticed, however long a large message takes on a slow line. A process that hangs is not: its kernel still answers.

    Args:
        identity: who this peer is.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self._instance = os.urandom(greeting.INSTANCE_BYTES)
        self._peers: dict[PeerID, list[Connection]] = {}
        self._greeting: WeakValueDictionary[PeerID, asyncio.Lock] = WeakValueDictionary()
        self._hellos: dict[Connection, Frames] = {}  # of accepted connections, not looked at yet
        self._rivals: dict[PeerID, _Rival] = {}  # who says to be a connected peer, while that one is asked
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
        if peer in self._rivals and not self._closed:
            # Not before the caller has dealt with the loss.
            asyncio.get_running_loop().call_soon(self._admit, peer)

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
        for rival in self._rivals.values():
            rival.timer.cancel()
        self._rivals.clear()
        if self._shared is not None:
            await self._shared.release()

    # -- messages

    def moved(self, peer: PeerID) -> int:
        return sum(connection.moved() for connection in self._peers.get(peer, ()))

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
            if greeting.is_later(frames):
                return self._on_later(connection, connection.peer, frames)
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
        for peer, rival in list(self._rivals.items()):
            if rival.connection is connection:
                rival.timer.cancel()
                del self._rivals[peer]
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
            if hello.instance == self._instance:
                return self._refuse(connection, f"{peer} is this peer itself")
            self.twins.found(peer)
            return self._refuse(connection, _TAKEN, greeting.taken(self._instance))
        earlier = self._peers.get(peer, [])
        if any(other.instance != hello.instance for other in earlier):
            return self._hold(connection, peer, hello.instance)
        if earlier:
            self._lives(peer)
        if any(other.router.accepts for other in earlier):
            self._lose(peer, "it connected anew")
        self._welcome(connection, peer, hello.instance)

    def _on_welcome(self, connection: Connection, frames: Frames) -> None:
        """The first message of a dialled connection."""
        peer = connection.peer
        assert peer is not None
        if connection.greeted is None or connection.greeted.done():
            return
        try:
            said = greeting.parse_answer(frames)
        except ValueError as error:
            return self._fail(connection, HandshakeFailed(f"{connection.endpoint}: {error}"))
        if isinstance(said, greeting.Taken):
            self.twins.found(self.peer_id)
            self._fail(connection, HandshakeFailed(f"{connection.endpoint}: it refused: {_TAKEN}"))
        elif said.peer != peer.key:
            self._fail(connection, HandshakeFailed(f"{connection.endpoint}: its hello names another peer"))
        elif any(other.instance != said.instance for other in self._peers.get(peer, [])):
            self._hold(connection, peer, said.instance)
        else:
            self._welcome(connection, peer, said.instance)

    def _welcome(self, connection: Connection, peer: PeerID, instance: bytes) -> None:
        """The other end is `peer`, and no other start of it is connected."""
        if connection.greeted is not None:
            if connection.greeted.done():
                return
            connection.greeted.set_result(None)
        elif not connection.router.send(connection, [greeting.hello(self.peer_id, self._instance)]):
            return
        connection.instance = instance
        self._establish(connection, peer)

    # -- two processes with one identity

    def _hold(self, connection: Connection, peer: PeerID, instance: bytes) -> None:
        """Another start of a connected peer is at the other end: ask the connected one whether it lives."""
        if peer in self._rivals:
            return self._reject(connection, "another process says to be that peer, too: try again", None)
        earlier = self._peers[peer][0]
        timer = asyncio.get_running_loop().call_later(ALIVE_TIMEOUT, self._lose, peer, "it was started anew")
        self._rivals[peer] = _Rival(connection, instance, timer)
        earlier.router.send(earlier, [zmq.Frame(greeting.LATER), greeting.taken(instance)])

    def _on_later(self, connection: Connection, peer: PeerID, frames: Frames) -> None:
        """A connected peer's transport says something."""
        try:
            said = greeting.parse_later(frames)
        except ValueError as error:
            connection.muted = True
            return connection.router.cut(connection, f"it broke the bounds: {error}")
        if isinstance(said, greeting.Taken):
            self.twins.found(self.peer_id)
            connection.router.send(connection, [zmq.Frame(greeting.LATER), greeting.alive()])
        else:
            self._lives(peer)

    def _lives(self, peer: PeerID) -> None:
        """The start of `peer` that is connected has spoken: whoever else says to be that peer is another process."""
        rival = self._rivals.pop(peer, None)
        if rival is not None:
            rival.timer.cancel()
            self.twins.found(peer)
            self._reject(rival.connection, _TAKEN, greeting.taken(self._peers[peer][0].instance))

    def _reject(self, connection: Connection, reason: str, answer: zmq.Frame | None) -> None:
        if connection.greeted is None:
            self._refuse(connection, reason, answer)
        else:
            self._fail(connection, HandshakeFailed(f"{connection.endpoint}: {reason}"))

    def _admit(self, peer: PeerID) -> None:
        """The start of `peer` that was connected is lost: the other one takes its place, unless a third has."""
        rival = self._rivals.pop(peer, None)
        if rival is None:
            return
        rival.timer.cancel()
        if peer in self._peers:
            self._reject(rival.connection, "another process says to be that peer, too: try again", None)
        else:
            self._welcome(rival.connection, peer, rival.instance)

    # -- after the greeting

    def _establish(self, connection: Connection, peer: PeerID) -> None:
        connection.peer = peer
        if connection.timer is not None:
            connection.timer.cancel()
        self._peers.setdefault(peer, []).append(connection)

    def _refuse(self, connection: Connection, reason: str, answer: zmq.Frame | None = None) -> None:
        log.info("refused a connection: %s", reason)
        connection.muted = True
        connection.router.send(connection, [answer or greeting.refusal(reason)])
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
        self._admit(peer)

    # -- sockets

    def _router(self, *, accepts: bool) -> Router:
        if self._shared is None:
            self._shared = SharedContext.acquire()
        return Router(
            self._shared.context,
            self.identity,
            accepts=accepts,
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
