"""A DHT node that makes its own transport, on any event loop. Users know it as `shoal.dht.DHTNode`.

`node.py` is separate because its node runs over any transport, the simulated one included.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.dht.node import DHTNode
from shoal.dht.validation import RecordValidator
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.interfaces import is_of_this_machine
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.sockets import SocketTransport
from shoal.reach.asking import Asker, Asking, no_relays
from shoal.reach.circuits import Circuits
from shoal.reach.finding import Reached, WayIn
from shoal.reach.natpmp import NatPmp
from shoal.reach.portmap import PortMapping
from shoal.reach.probe import DialBack
from shoal.reach.punch import Punch
from shoal.reach.relay import Relay
from shoal.reach.upnp import Upnp

log = logging.getLogger(__name__)


class CreatedNode(DHTNode, Asker):
    """One node of the DHT with a transport of its own. Make it by `create`; `DHTNode` documents the rest.

    Attributes:
        is_client: whether nobody can dial this node: it was made a client, or the other nodes found that they can't
            reach it. (A node that only relays reach keeps no records for others either, but others can dial it.)
        circuits: the circuits through relays, of other peers and to this node.
        relay: this node's work as a relay; None if it is no relay.
    """

    is_client: bool
    circuits: Circuits
    relay: Relay | None
    _insists: bool
    _mapping: PortMapping | None = None

    @classmethod
    async def create(
        cls,
        initial_peers: Sequence[Multiaddr | str] | None = None,
        *,
        host_maddrs: Sequence[Multiaddr | str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[Multiaddr | str] = (),
        identity: Identity | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool | None = False,
        record_validator: RecordValidator | None = None,
        validators: Iterable[RecordValidator] = (),
        wait_timeout: float = 3.0,
        bootstrap_timeout: float = 10.0,
        ensure_bootstrap_success: bool = True,
        port_mapping: bool = False,
        upload_limit: float | None = None,
        download_limit: float | None = None,
        relay: bool = False,
        relay_bandwidth: float | None = None,
        **options: Any,
    ) -> CreatedNode:
        """Make a node with a transport of its own, on the running event loop. It listens and joins the DHT; `shutdown`
        ends both.

        The arguments have the names that hivemind uses.

        Args:
            initial_peers: addresses of nodes of the DHT, each ending in /p2p/<peer id>; None or an empty list begins a
                new DHT.
            host_maddrs: addresses to listen on; a client listens on none. The default is loopback with any free port.
            announce_maddrs: further addresses to announce to other peers.
            identity: this node's key pair. None reads it from `identity_path`, or makes a new one.
            identity_path: file with the node's identity. It is created if it does not exist.
            client_mode: see `DHTNode`. None: decide after joining through another machine, by whether other nodes reach
                this one.
            record_validator: one further rule for records.
            validators: further rules for records. Every node also has a `SignatureValidator`.
            wait_timeout: seconds after which a node that does not answer counts as failed.
            bootstrap_timeout: seconds within which an initial peer must answer.
            ensure_bootstrap_success: if False, a node that gets no answer from any initial peer logs a warning, goes
                on, and dials them again later.
            port_mapping: ask the router, by NAT-PMP or UPnP, to forward a port to this node. The node announces the
                mapped address once others have reached it there.
            upload_limit: bytes per second that this node sends at most; None for no limit.
            download_limit: bytes per second that this node receives at most; None for no limit.
            relay: connect other peers, as a relay, to peers that nobody can dial.
            relay_bandwidth: bytes per second that pass through this relay at most; None for no limit.
            **options: further arguments of `DHTNode`.

        Returns:
            The node, which has joined the DHT.

        Raises:
            ValueError: if an address is malformed, or a port is to be mapped to a node that listens on loopback only.
            PeerUnreachable: if no initial peer answers. The message names each peer and the reason.
            OSError: if an address is taken, or the identity's file can't be read.
        """
        if identity is None:
            identity = Identity.from_file(identity_path) if identity_path is not None else Identity()
        rules = [*validators, *([record_validator] if record_validator is not None else [])]
        transport = SocketTransport(identity, upload_limit=upload_limit, download_limit=download_limit)
        node, relaying = Node(identity, transport), None
        mapping: PortMapping | None = None
        try:
            for address in map(Multiaddr, () if client_mode else host_maddrs):
                await node.listen(address)
            DialBack(node)
            relaying = Relay(node, transport, relay_bandwidth) if relay else None
            if port_mapping:
                mapping = PortMapping([NatPmp(), Upnp()], _port_to_map(node.addresses))
            options |= {"validators": rules, "request_timeout": wait_timeout}
            elsewhere = not all(is_of_this_machine(Multiaddr(address)) for address in initial_peers or ())
            # Until the node knows whether others reach it, it keeps no records for them: they would look for the
            # records in vain.
            options["client_mode"] = elsewhere if client_mode is None else client_mode
            dht_node = cls(node, announce=list(map(Multiaddr, announce_maddrs)), **options)
            dht_node.is_client, dht_node._insists = client_mode is True, client_mode is False
            dht_node.circuits, dht_node.relay = Circuits(node, transport, dht_node.contacts), relaying
            dht_node.circuits.on_dialled = Punch(node, transport, dht_node._observers, dht_node._direct).begin
            if mapping is not None:
                dht_node._mapping = mapping
                mapped = node.spawn(mapping.begin())
            try:
                await dht_node.bootstrap(initial_peers or (), bootstrap_timeout)
            except PeerUnreachable as error:
                if ensure_bootstrap_success:
                    raise
                log.warning("%s", error)
            if mapping is not None:
                await mapped
                node.spawn(mapping.keep_up())
            if client_mode is not True:
                await dht_node._find_out()
        except BaseException:  # also when cancelled: the node must not go on listening
            if relaying is not None:
                relaying.close()
            await node.close()
            if mapping is not None:
                await mapping.end()
            raise
        return dht_node

    async def _find_out(self) -> None:
        """Ask other nodes whether they reach this one, become a node or a client accordingly, and keep asking."""
        reserve = no_relays if self._insists else self.circuits.reserve
        asking = Asking(self, reserve, insists=self._insists, rng=self._rng)

        def led() -> None:
            self.node.spawn(asking.led(self.circuits.addresses))

        self.circuits.on_change = led
        await asking.find_out()
        if asking.finding == WayIn() and self.client_mode:
            await self.found(asking.finding, client_mode=False)
        if not all(address.is_loopback for address in self.own_addresses()):
            self.node.spawn(asking.keep_up())

    async def found_out(self, finding: WayIn) -> None:
        """Apply the finding whether and how others reach this node."""
        unreached = finding.reached in (Reached.NOBODY, Reached.RELAYED)
        self.is_client = finding.reached is Reached.NOBODY and not self._insists
        if finding.reached is Reached.NOBODY and self._insists:
            finding = WayIn()  # it announces the addresses that its user named
        await self.found(finding, client_mode=unreached and not self._insists)
        if not unreached:
            self.circuits.stop_reserving()

    def mapped_address(self) -> Multiaddr | None:
        """The address at which, by the router's word, others reach this node; None if no port is mapped."""
        return None if self._mapping is None else self._mapping.address

    def _observers(self) -> list[Multiaddr]:
        connected = [peer for peer in self.contacts() if self.node.is_connected(peer)]
        # a peer that dialled this node has no known address
        known = (self.node.known_addresses(peer)[:1] for peer in connected)
        return [address for addresses in known for address in addresses if address.relay is None]

    def _direct(self) -> list[Multiaddr]:
        finding = self._protocol.finding
        return list(finding.addresses) if finding.reached in (Reached.PUBLIC, Reached.MAPPED) else []

    async def shutdown(self) -> None:
        """Leave the DHT as `close` does, end all connections of `node`, and end the mapping of its port."""
        await self.close()
        self.circuits.close()
        if self.relay is not None:
            self.relay.close()
        if self._mapping is not None:
            await self._mapping.end()
        await self.node.close()


def _port_to_map(listening: Sequence[Multiaddr]) -> int:
    for address in listening:
        if address.protocol == "ip4" and not address.is_loopback:
            return address.port
    raise ValueError("port_mapping=True needs an address of a network to listen on: host_maddrs=['/ip4/0.0.0.0/tcp/0']")
