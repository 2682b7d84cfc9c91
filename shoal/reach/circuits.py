"""A peer's use of relays: being reached through some, and reaching others through them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from shoal.p2p.errors import P2PError, PeerUnreachable, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.quota import Quota, Rate
from shoal.p2p.route import PeerRoute
from shoal.p2p.sockets import SocketTransport
from shoal.reach.messages import CIRCUIT, LEASE_SECONDS, RELAY, Circuit, Incoming, Opened, Reserve, Reserved

log = logging.getLogger(__name__)

MAX_RELAYS: Final = 3
ADDRESSES_PER_RELAY: Final = 2  # addresses announced per relay
ASK_TIMEOUT: Final = 3.0
SEARCH_INTERVAL: Final = 2.0  # seconds between two looks for a relay, if there is none
LOOK_INTERVAL: Final = 15.0  # seconds, if there are some, and not enough
NO_RELAY_SECONDS: Final = 600.0  # seconds for which a node that does not relay is not asked again
MAX_COMING: Final = 64  # incoming circuits that this peer is about to accept
COMING: Final = Rate(8, 128)  # of one relay: the relay chooses the address to which this peer connects


class Circuits:
    """Dials through relays, and keeps reservations at relays if told to.

    Args:
        node: this peer.
        transport: the transport of `node`.
        candidates: the nodes that may be relays, best first. Those that are connected are asked.

    Attributes:
        addresses: the addresses at which relays make this peer reachable.
        on_change: called when `addresses` have changed.
        on_dialled: called with peer and address when a link through a relay is open that this side has dialled.
    """

    def __init__(self, node: Node, transport: SocketTransport, candidates: Callable[[], Iterable[PeerID]]) -> None:
        self.addresses: list[Multiaddr] = []
        self.on_change: Callable[[], None] = lambda: None
        self.on_dialled: Callable[[PeerID, Multiaddr], None] = lambda peer, address: None
        self._node, self._transport, self._candidates = node, transport, candidates
        self._reserved: dict[PeerID, float] = {}  # when to renew each
        self._no_relays: dict[PeerID, float] = {}  # until when not to ask each
        self._coming, self._told = 0, Quota(COMING)
        self._news = asyncio.Event()  # a relay was lost
        self._keeping: asyncio.Task[None] | None = None
        self._stop_listening = node.on_lost(lambda peer, _reason: self._lost(peer))
        transport.router = self._route
        node.serve(CIRCUIT, self._handle)

    def close(self) -> None:
        """Stop using relays."""
        self.on_change = lambda: None
        self.stop_reserving()
        self._stop_listening()
        self._transport.router = None
        self._node.stop_serving(CIRCUIT)

    def _route(self, address: Multiaddr) -> PeerRoute:
        return Through(self._node, self._transport, address, self.on_dialled)

    # -- to be reached

    async def reserve(self) -> list[Multiaddr]:
        """Reserve at up to MAX_RELAYS relays, and keep the reservations. Returns `addresses` after every candidate was
        asked.
        """
        if self._keeping is None:
            await self._look()
            self._keeping = self._node.spawn(self._keep())
        return self.addresses

    def stop_reserving(self) -> None:
        """Stop being reached through relays. The present reservations expire."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        self._reserved.clear()
        self._changed()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait = LEASE_SECONDS
            if len(self._reserved) < MAX_RELAYS:
                wait = LOOK_INTERVAL if self._reserved else SEARCH_INTERVAL
            renewals = [renew_at - loop.time() for renew_at in self._reserved.values()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([wait, *renewals]))):
                    await self._news.wait()
            self._news.clear()
            await self._look()

    async def _look(self) -> None:
        """Renew the reservations that are due, and reserve at other relays if there are too few."""
        now = asyncio.get_running_loop().time()
        self._no_relays = {peer: until for peer, until in self._no_relays.items() if until > now}
        await asyncio.gather(*(self._ask(peer) for peer, renew_at in list(self._reserved.items()) if renew_at <= now))
        known = {*self._reserved, *self._no_relays, self._node.peer_id}
        others = [peer for peer in dict.fromkeys(self._candidates()) if peer not in known]
        others = [peer for peer in others if self._node.is_connected(peer) and self._listens(peer)]
        while others and (missing := MAX_RELAYS - len(self._reserved)) > 0:
            await asyncio.gather(*map(self._ask, others[:missing]))
            del others[:missing]
        self._changed()

    async def _ask(self, relay: PeerID) -> None:
        loop = asyncio.get_running_loop()
        try:
            reserved = await self._node.call(relay, RELAY, Reserve(), Reserved, timeout=ASK_TIMEOUT)
        except (P2PError, TimeoutError) as error:
            log.debug("no reservation at %r: %s", relay, str(error) or "no answer")
            self._reserved.pop(relay, None)
            if isinstance(error, Unavailable):
                self._no_relays[relay] = loop.time() + NO_RELAY_SECONDS
        else:
            if self._node.is_connected(relay):  # it may be lost at the moment in which it answers
                self._reserved[relay] = loop.time() + max(reserved.seconds / 2, SEARCH_INTERVAL)

    def _lost(self, peer: PeerID) -> None:
        self._no_relays.pop(peer, None)  # it may relay when it comes back
        if self._reserved.pop(peer, None) is not None:
            self._news.set()  # the change is reported after other relays were asked

    def _changed(self) -> None:
        found = [address.by_relay(self._node.peer_id) for relay in self._reserved for address in self._listens(relay)]
        if found != self.addresses:
            self.addresses = found
            self.on_change()

    def _listens(self, relay: PeerID) -> list[Multiaddr]:
        """The addresses of a relay, the one at which this peer has reached it first. Loopback addresses only if there
        are no others.
        """
        known = [a for a in self._node.known_addresses(relay) if a.relay is None]
        known.sort(key=lambda address: (address.is_loopback, address.host != self._transport.source(relay)))
        return [a for a in known if a.is_loopback == known[0].is_loopback][:ADDRESSES_PER_RELAY]

    def _handle(self, relay: PeerID, coming: Incoming, _buffers: Sequence[memoryview]) -> None:
        if relay not in self._reserved or self._coming >= MAX_COMING:
            return
        if self._told.use(relay, 1, asyncio.get_running_loop().time()):
            self._coming += 1
            self._node.spawn(self._come(relay, coming))

    async def _come(self, relay: PeerID, coming: Incoming) -> None:
        """Be the other end of a circuit that somebody has asked for."""
        try:
            connection = await connect(self._transport, self._listens(relay), coming.token)
        except PeerUnreachable as error:
            log.info("a circuit of %r did not come about: %s", PeerID(coming.peer), error)
        else:
            self._transport.accept(connection, self._transport.source(relay) or "0.0.0.0", relayed=True)
        finally:
            self._coming -= 1


class Through(PeerRoute):
    """The route to a peer through a relay. Each connection is a circuit of its own.

    Args:
        node, transport: of this peer.
        address: the other peer's address, through the relay.
        on_opened: called with peer and address when a link over this route is open.
    """

    relayed = True

    def __init__(
        self,
        node: Node,
        transport: SocketTransport,
        address: Multiaddr,
        on_opened: Callable[[PeerID, Multiaddr], None],
    ) -> None:
        self._node, self._transport, self.address, self._on_opened = node, transport, address, on_opened

    def opened(self) -> None:
        assert self.address.peer_id is not None
        self._on_opened(self.address.peer_id, self.address)

    async def connect(self) -> socket.socket:
        address, node = self.address, self._node
        relay, peer = address.relay, address.peer_id
        assert relay is not None
        assert peer is not None
        if relay == node.peer_id:
            raise PeerUnreachable(f"{address}: this peer is the relay, and the other one is not connected to it")
        if not node.is_connected(relay):
            await self._transport.dial(address.of_relay())
        try:
            opened = await node.call(relay, RELAY, Circuit(peer.key), Opened, timeout=ASK_TIMEOUT)
        except TimeoutError:
            raise PeerUnreachable(f"the relay {relay!r} did not answer") from None
        except PeerUnreachable:
            raise
        except P2PError as error:
            raise PeerUnreachable(f"the relay {relay!r} does not lead there: {error}") from error
        return await connect(self._transport, [address.of_relay()], opened.token)


async def connect(transport: SocketTransport, relay: Iterable[Multiaddr], token: bytes) -> socket.socket:
    """Open one end of the circuit with that token. Raises PeerUnreachable."""
    loop = asyncio.get_running_loop()
    reason = "no address of the relay is known"
    for address in relay:
        try:
            found = await transport.resolve(address)
        except OSError as error:
            reason = str(error)
            continue
        for ip in found:
            try:
                connection = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
            except OSError as error:  # no file descriptors left, or no IPv6
                reason = str(error)
                continue
            try:
                connection.setblocking(False)
                async with asyncio.timeout(ASK_TIMEOUT):
                    await loop.sock_connect(connection, (str(ip), address.port))
                    await loop.sock_sendall(connection, token)
            except (OSError, TimeoutError) as error:
                reason = f"{address}: {str(error) or 'no answer'}"
                connection.close()
            except BaseException:  # cancelled
                connection.close()
                raise
            else:
                return connection
    raise PeerUnreachable(f"the relay can't be reached: {reason}")
