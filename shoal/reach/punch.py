"""A direct connection in place of a circuit: by dialling back, or by a hole that both peers punch in their routers.

A router that drops what comes lets in the answers to what went out. So both peers dial each other at the same moment,
each from a port whose address outside it has asked others for: TCP calls that a simultaneous open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from shoal.p2p.errors import P2PError, PeerUnreachable, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.interfaces import concrete_addresses
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Answer, Node
from shoal.p2p.quota import Quota, Rate
from shoal.p2p.route import Route
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import Observation
from shoal.reach.circuits import connect
from shoal.reach.finding import host_of
from shoal.reach.messages import MAX_BACK, PUNCH, Back, Came, Meet

log = logging.getLogger(__name__)

HOSTS: Final = 2  # that say from where a port is seen to come; with one only, it is tried as well, which does no harm
MAX_ASKED: Final = 3
TRIES: Final = 2
AGAIN: Final = 0.5  # seconds until the next one
OBSERVE_TIMEOUT: Final = 1.5  # seconds
ASK_TIMEOUT: Final = 5.0
DIAL_SECONDS: Final = 3.0  # for which both dial each other
DIAL_INTERVAL: Final = 0.1  # seconds that a dial has at least; one that is repeated too soon answers no answer
LEAST_PORT: Final = 1024  # that a router gives to what goes out; services are below
RATE: Final = Rate(0.5, 32)  # how often one peer may have this one dial, and how often all together one host


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A local port, and where it is seen from outside.

    Attributes:
        holder: a socket that keeps the port.
        port: the local one.
        seen: by others.
        seconds: to a host outside and back.
    """

    holder: socket.socket
    port: int
    seen: Observation
    seconds: float


class Punch:
    """Has direct connections take the place of circuits that this peer has dialled, and helps others to that.

    Args:
        node: this peer.
        transport: that of `node`.
        observers: addresses of public nodes, which say from where a connection comes.
        direct: the addresses at which others reach this peer without a relay.
    """

    def __init__(
        self,
        node: Node,
        transport: SocketTransport,
        observers: Callable[[], Sequence[Multiaddr]],
        direct: Callable[[], Sequence[Multiaddr]],
    ) -> None:
        self._node, self._transport, self._observers, self._direct = node, transport, observers, direct
        self._asked, self._dialled = Quota(RATE), Quota(RATE)
        node.serve(PUNCH, self._handle)

    def begin(self, peer: PeerID, circuit: Multiaddr) -> None:
        """There is a link to that peer through a circuit, which this side has dialled."""
        self._node.spawn(self._replace(peer, circuit.of_relay()))

    async def _replace(self, peer: PeerID, relay: Multiaddr) -> None:
        for _ in range(TRIES):
            try:
                if await self._is_dialled_back(peer, self._direct()):
                    return
                mapped, there = await self._agree(peer, relay)
                with mapped.holder:
                    if there.host == mapped.seen.host and await self._is_dialled_back(peer, self._inside(there.host)):
                        return  # one router for both, and few of those send back in what comes from inside
                    connection = await _open(mapped, there)
                await self._transport.succeed(peer, connection, Hole(self, peer, relay))
            except (P2PError, OSError, TimeoutError) as error:
                log.debug("no direct connection to %r: %s", peer, str(error) or "no answer")
            else:
                return log.info("a direct connection to %r takes the place of the circuit", peer)
            if not self._transport.is_connected(peer):
                return
            await asyncio.sleep(AGAIN)

    async def _is_dialled_back(self, peer: PeerID, addresses: Sequence[Multiaddr]) -> bool:
        back = tuple(str(address.with_peer(None)) for address in addresses)[:MAX_BACK]
        if not back:
            return False
        with contextlib.suppress(Refused):
            await self._node.call(peer, PUNCH, Back(back), Came, timeout=ASK_TIMEOUT)
            return True
        return False

    async def dial(self, peer: PeerID, relay: Multiaddr) -> socket.socket:
        """A direct connection to that peer, which accepts it. Raises P2PError, OSError or TimeoutError."""
        mapped, there = await self._agree(peer, relay)
        with mapped.holder:
            return await _open(mapped, there)

    async def _agree(self, peer: PeerID, relay: Multiaddr) -> tuple[_Mapped, Meet]:
        """From where this peer dials, and where it meets that one."""
        assert relay.peer_id is not None
        mapped = await self._map([relay])
        try:
            me = Meet(mapped.seen.host, mapped.seen.port, mapped.seconds, relay.peer_id.key)
            there = await self._node.call(peer, PUNCH, me, Meet, timeout=ASK_TIMEOUT)
            self._check(there, mapped)
        except BaseException:  # cancelled, too: the port is free again
            mapped.holder.close()
            raise
        return mapped, there

    def _inside(self, seen: str) -> list[Multiaddr]:
        """Where this peer listens, for those in its own network."""
        listening = [concrete for address in self._node.addresses for concrete in concrete_addresses(address)]
        is_loopback = ipaddress.ip_address(seen).is_loopback
        return [address for address in listening if address.is_loopback is is_loopback]

    # -- the other side

    def _handle(self, peer: PeerID, message: msgspec.Struct, _buffers: Sequence[memoryview]) -> Awaitable[Answer]:
        if not self._asked.use(peer, 1, asyncio.get_running_loop().time()):
            raise Refused("ask less often")
        match message:
            case Back():
                return self._dial_back(peer, message)
            case Meet():
                return self._meet(peer, message)
        raise Refused(f"{type(message).__name__} is a reply, not a request")

    async def _dial_back(self, peer: PeerID, back: Back) -> Came:
        route = Direct(self._transport, [_parsed(text, peer) for text in back.addresses])
        await self._transport.succeed(peer, await route.connect(), route)
        return Came()

    async def _meet(self, peer: PeerID, there: Meet) -> Meet:
        mapped = await self._map(self._node.known_addresses(PeerID(there.relay))[:1])
        try:
            self._check(there, mapped)
        except BaseException:  # cancelled, too: the port is free again
            mapped.holder.close()
            raise
        self._node.spawn(self._come(mapped, there))
        return Meet(mapped.seen.host, mapped.seen.port, mapped.seconds, there.relay)

    async def _come(self, mapped: _Mapped, there: Meet) -> None:
        with mapped.holder, contextlib.suppress(PeerUnreachable, OSError):  # the other side says so
            self._transport.accept(await _open(mapped, there), there.host)

    # -- both

    async def _map(self, relay: Sequence[Multiaddr]) -> _Mapped:
        """A fresh port, and where it is seen from outside: by the relay first. Raises Refused if two hosts see it at
        different ports, PeerUnreachable if nobody says."""
        loop = asyncio.get_running_loop()
        known = {address.peer_id: address for address in (*relay, *self._observers()) if address.relay is None}
        observers = list(known.values())[:MAX_ASKED]
        if not observers:
            raise PeerUnreachable("nobody is there who could say from where this peer comes")
        try:
            [ip, *_] = await self._transport.resolve(observers[0])
        except OSError as error:
            raise PeerUnreachable(f"{observers[0]}: {error}") from error
        holder = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
        found: list[Observation] = []
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            port: int = holder.getsockname()[1]
            while observers and len(found) < HOSTS:
                started = loop.time()
                with contextlib.suppress(PeerUnreachable):
                    seen = await self._observed(observers.pop(0), port)
                    if ipaddress.ip_address(seen.host).version == ip.version:  # the other one has ports of its own
                        found.append(seen)
                        seconds = loop.time() - started
            if not found:
                raise PeerUnreachable("nobody says from where this peer comes")
            if len({(seen.host, seen.port) for seen in found}) > 1:
                raise Refused("the router gives each destination another port")
        except BaseException:  # cancelled, too: the port is free again
            holder.close()
            raise
        return _Mapped(holder, port, found[0], seconds)

    def _check(self, there: Meet, mapped: _Mapped) -> None:
        """Raises Refused for what is not to be dialled: this peer is no scanner of other networks' services, and no
        part of a flood. (A relay and a peer that lie together name any host.)"""
        try:
            ip, own = ipaddress.ip_address(there.host), ipaddress.ip_address(mapped.seen.host)
        except ValueError as error:
            raise Refused(str(error)) from error
        of_other_kind = (ip.version, ip.is_loopback, ip.is_global) != (own.version, own.is_loopback, own.is_global)
        if of_other_kind or ip.is_multicast or ip.is_unspecified:
            raise Refused(f"{there.host} can't be dialled from here")
        if there.port < LEAST_PORT:
            raise Refused(f"{there.port} is not a port of a router")
        if not self._dialled.use(host_of(there.host), 1, asyncio.get_running_loop().time()):
            raise Refused(f"{there.host} was dialled too often")

    async def _observed(self, address: Multiaddr, port: int) -> Observation:
        try:
            async with asyncio.timeout(OBSERVE_TIMEOUT):
                return await self._transport.observe(address, port)
        except TimeoutError:
            raise PeerUnreachable(f"{address} does not answer") from None


def _parsed(text: str, peer: PeerID) -> Multiaddr:
    try:
        address = Multiaddr(text)
    except ValueError as error:
        raise Refused(str(error)) from error
    if address.relay is not None or address.peer_id is not None:
        raise Refused(f"{address} is not an address to dial")
    return address.with_peer(peer)


async def _open(mapped: _Mapped, there: Meet) -> socket.socket:
    """Dial, from that port, somebody who does the same. Raises PeerUnreachable."""
    loop = asyncio.get_running_loop()
    interval = max(DIAL_INTERVAL, mapped.seconds + there.seconds)  # about twice the time between the two, or more
    until = loop.time() + DIAL_SECONDS
    while loop.time() < until:
        connection = socket.socket(mapped.holder.family)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(("", mapped.port))
            connection.setblocking(False)
            async with asyncio.timeout(interval):
                with contextlib.suppress(OSError):  # a router refuses what came too early
                    await loop.sock_connect(connection, (there.host, there.port))
                    return connection
                await asyncio.sleep(interval)
        except TimeoutError:
            connection.close()
        except BaseException:  # cancelled
            connection.close()
            raise
    raise PeerUnreachable("neither router lets the other side in")


class Hole(Route):
    """The way through a hole in both routers; each connection needs one of its own.

    Args:
        punch: of this peer.
        peer: the other one.
        relay: says from where connections come.
    """

    def __init__(self, punch: Punch, peer: PeerID, relay: Multiaddr) -> None:
        self._punch, self._peer, self._relay = punch, peer, relay

    async def connect(self) -> socket.socket:
        try:
            return await self._punch.dial(self._peer, self._relay)
        except PeerUnreachable:
            raise
        except (P2PError, OSError, TimeoutError) as error:
            raise PeerUnreachable(str(error) or "no answer") from error


class Direct(Route):
    """The way to a peer that was found to be reached directly.

    Args:
        transport: of this peer.
        addresses: of the other one.
    """

    def __init__(self, transport: SocketTransport, addresses: Sequence[Multiaddr]) -> None:
        self._transport, self._addresses = transport, addresses

    async def connect(self) -> socket.socket:
        return await connect(self._transport, self._addresses, b"")
