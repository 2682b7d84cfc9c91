"""Replaces a circuit by a direct connection: by dialling back, or by holes that both peers punch in their routers.

A router that drops incoming connections lets in the answers to outgoing ones. So both peers dial each other at the same
moment, each from a port whose outside address it has learned from other hosts. TCP calls this a simultaneous open.
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
from shoal.p2p.route import PeerRoute
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import Observation
from shoal.reach.circuits import connect
from shoal.reach.finding import host_of
from shoal.reach.messages import MAX_BACK, PUNCH, Back, Came, Meet

log = logging.getLogger(__name__)

HOSTS: Final = 2  # hosts that report this peer's outside port. One is enough to try, which does no harm
MAX_ASKED: Final = 3
TRIES: Final = 2
AGAIN: Final = 0.5  # seconds until the next try
OBSERVE_TIMEOUT: Final = 1.5  # seconds
ASK_TIMEOUT: Final = 5.0
DIAL_SECONDS: Final = 3.0  # for which both sides dial each other
# seconds between dials at least; a dial repeated too soon would not receive the answer to the last one
DIAL_INTERVAL: Final = 0.1
LEAST_PORT: Final = 1024  # routers give outgoing connections ports from here on; services are below
# how often one peer may make this peer dial, and how often all peers together may make it dial one host
RATE: Final = Rate(0.5, 32)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A local port, and its outside address.

    Attributes:
        holder: a socket that keeps the port.
        port: the local port.
        seen: the address that others see.
        seconds: the time to a host outside and back.
    """

    holder: socket.socket
    port: int
    seen: Observation
    seconds: float


class Punch:
    """Replaces circuits that this peer has dialled by direct connections, and helps others to do so.

    Args:
        node: this peer.
        transport: the transport of `node`.
        observers: addresses of public nodes, which report from where a connection comes.
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
        """To be called when a link to that peer is open through a circuit that this side has dialled."""
        self._node.spawn(self._replace(peer, circuit.of_relay()))

    async def _replace(self, peer: PeerID, relay: Multiaddr) -> None:
        for _ in range(TRIES):
            try:
                if await self._is_dialled_back(peer, self._direct()):
                    return
                mapped, there = await self._agree(peer, relay)
                with mapped.holder:
                    if there.host == mapped.seen.host and await self._is_dialled_back(peer, self._inside(there.host)):
                        return  # both are behind one router, and few routers send such connections back in
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
        """The port from which this peer dials, and the address where the two meet."""
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
        """The addresses where this peer listens, for peers in its own network."""
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
        with mapped.holder, contextlib.suppress(PeerUnreachable, OSError):  # the other side reports it
            self._transport.accept(await _open(mapped, there), there.host)

    # -- both

    async def _map(self, relay: Sequence[Multiaddr]) -> _Mapped:
        """A new local port, and its outside address, which the relay is asked for first.

        Raises Refused if two hosts see it at different ports, and PeerUnreachable if nobody reports it.
        """
        loop = asyncio.get_running_loop()
        known = {address.peer_id: address for address in (*relay, *self._observers()) if address.relay is None}
        observers = list(known.values())[:MAX_ASKED]
        if not observers:
            raise PeerUnreachable("no host is known that could report this peer's outside address")
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
                    if ipaddress.ip_address(seen.host).version == ip.version:  # IPv4 and IPv6 have ports of their own
                        found.append(seen)
                        seconds = loop.time() - started
            if not found:
                raise PeerUnreachable("no host has reported this peer's outside address")
            if len({(seen.host, seen.port) for seen in found}) > 1:
                raise Refused("the router gives each destination another port")
        except BaseException:  # cancelled, too: the port is free again
            holder.close()
            raise
        return _Mapped(holder, port, found[0], seconds)

    def _check(self, there: Meet, mapped: _Mapped) -> None:
        """Raises Refused for an address that must not be dialled, so that this peer can't be used to scan other
        networks or to flood them. (A relay and a peer that lie together can name any host.)
        """
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
    """Dial, from that port, a peer that does the same. Raises PeerUnreachable."""
    loop = asyncio.get_running_loop()
    interval = max(DIAL_INTERVAL, mapped.seconds + there.seconds)  # about the round-trip time between the two, or more
    until = loop.time() + DIAL_SECONDS
    while loop.time() < until:
        connection = socket.socket(mapped.holder.family)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(("", mapped.port))
            connection.setblocking(False)
            async with asyncio.timeout(interval):
                with contextlib.suppress(OSError):  # a router refuses a connection that comes too early
                    await loop.sock_connect(connection, (there.host, there.port))
                    return connection
                await asyncio.sleep(interval)
        except TimeoutError:
            connection.close()
        except BaseException:  # cancelled
            connection.close()
            raise
    raise PeerUnreachable("neither router lets the other side in")


class Hole(PeerRoute):
    """The route through holes in both routers. Each connection needs a hole of its own.

    Args:
        punch: the `Punch` of this peer.
        peer: the other peer.
        relay: the relay, which reports from where connections come.
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


class Direct(PeerRoute):
    """The route to a peer that can be reached directly.

    Args:
        transport: the transport of this peer.
        addresses: the other peer's addresses.
    """

    def __init__(self, transport: SocketTransport, addresses: Sequence[Multiaddr]) -> None:
        self._transport, self._addresses = transport, addresses

    async def connect(self) -> socket.socket:
        return await connect(self._transport, self._addresses, b"")
