"""A node of the DHT that makes its own transport, on any loop: what `shoal.dht.DHTNode` is for users.

It is apart from `node.py` because that runs over any transport, the simulated one included.
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
from shoal.reach.asking import Asking, no_relays
from shoal.reach.circuits import Circuits
from shoal.reach.finding import Finding, Reached
from shoal.reach.probe import DialBack
from shoal.reach.punch import Punch
from shoal.reach.relay import Relay

log = logging.getLogger(__name__)


class CreatedNode(DHTNode):
    """See `DHTNode`; made by `create`, with a transport of its own.

    Attributes:
        is_client: whether nobody can dial it: it was made a client, or nobody reaches it. (A node that is reached by
            relays only keeps nothing for others, too, but they dial it.)
        circuits: through relays; others', and those that lead to this node.
        relay: what it is to others, if it relays.
    """

    is_client: bool
    circuits: Circuits
    relay: Relay | None

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
        upload_limit: float | None = None,
        download_limit: float | None = None,
        relay: bool = False,
        relay_bandwidth: float | None = None,
        **options: Any,
    ) -> CreatedNode:
        """A node with a transport of its own, on the running loop, that listens and has joined the DHT; `shutdown` ends
        both. The arguments have hivemind's names.

        Args:
            initial_peers: addresses of nodes of the DHT, which end in /p2p/<peer id>; none to begin one.
            host_maddrs: addresses to listen on; a client listens on none.
            announce_maddrs: addresses to name to others besides those.
            identity: who this node is; None takes it from `identity_path`, or makes a new one.
            identity_path: file that keeps who this node is, made if it does not exist.
            client_mode: see `DHTNode`; None: whether others reach it decides, once it has joined through another
                machine.
            record_validator: a rule for records, for who has only one.
            validators: rules for records beside `SignatureValidator`, which every node has.
            wait_timeout: seconds until a node that does not answer counts as failed.
            bootstrap_timeout: seconds that the initial peers have to answer.
            ensure_bootstrap_success: if False, a node whom no initial peer answers goes on, and dials them again.
            upload_limit, download_limit: bytes per second that this node sends and receives at most; None for no limit.
            relay: lead others to peers that nobody can dial.
            relay_bandwidth: bytes per second that pass through this relay at most; None for no limit.
            **options: see `DHTNode`.

        Raises:
            ValueError: for an address that can't be.
            PeerUnreachable: if no initial peer answers; names each, and why.
            OSError: if an address is taken, or the identity's file can't be read.
        """
        if identity is None:
            identity = Identity.from_file(identity_path) if identity_path is not None else Identity()
        rules = [*validators, *([record_validator] if record_validator is not None else [])]
        transport = SocketTransport(identity, upload_limit=upload_limit, download_limit=download_limit)
        node, relaying = Node(identity, transport), None
        try:
            for address in map(Multiaddr, () if client_mode else host_maddrs):
                await node.listen(address)
            DialBack(node)
            relaying = Relay(node, transport, relay_bandwidth) if relay else None
            options |= {"validators": rules, "request_timeout": wait_timeout}
            elsewhere = not all(is_of_this_machine(Multiaddr(address)) for address in initial_peers or ())
            # Whom nobody may reach keeps nothing for others until it is known: they would look for it in vain.
            options["client_mode"] = elsewhere if client_mode is None else client_mode
            dht_node = cls(node, announce=list(map(Multiaddr, announce_maddrs)), **options)
            dht_node.is_client = client_mode is True
            dht_node.circuits, dht_node.relay = Circuits(node, transport, dht_node.contacts), relaying
            dht_node.circuits.on_dialled = Punch(node, transport, dht_node._observers, dht_node._direct).begin
            try:
                await dht_node.bootstrap(initial_peers or (), bootstrap_timeout)
            except PeerUnreachable as error:
                if ensure_bootstrap_success:
                    raise
                log.warning("%s", error)
            if client_mode is not True:
                await dht_node._find_out(insists=client_mode is False)
        except BaseException:  # cancelled, too: the node must not go on listening
            if relaying is not None:
                relaying.close()
            await node.close()
            raise
        return dht_node

    async def _find_out(self, *, insists: bool) -> None:
        """Ask others whether they reach this node, and be a node or a client by that; go on to ask."""

        async def changed(finding: Finding) -> None:
            unreached = finding.reached in (Reached.NOBODY, Reached.RELAYED)
            self.is_client = not insists and finding.reached is Reached.NOBODY
            if insists and finding.reached is Reached.NOBODY:
                finding = Finding()  # it announces what its user says
            await self.found(finding, client_mode=unreached and not insists)
            if finding.reached is not Reached.RELAYED and finding.reached is not Reached.NOBODY:
                self.circuits.stop_reserving()

        asking = Asking(
            self.node,
            contacts=self.contacts,
            own=lambda: self.own_addresses(latest=True),
            changed=changed,
            insists=insists,
            reserve=no_relays if insists else self.circuits.reserve,
            rng=self._rng,
        )

        def led() -> None:
            self.node.spawn(asking.led(self.circuits.addresses))

        self.circuits.on_change = led
        await asking.find_out()
        if asking.finding == Finding() and self.client_mode:
            await self.found(asking.finding, client_mode=False)
        if not all(address.is_loopback for address in self.own_addresses()):
            self.node.spawn(asking.keep_up())

    def _observers(self) -> list[Multiaddr]:
        connected = [peer for peer in self.contacts() if self.node.is_connected(peer)]
        known = [self.node.known_addresses(peer)[:1] for peer in connected]
        return [address for [address] in known if address.relay is None]

    def _direct(self) -> list[Multiaddr]:
        finding = self._protocol.finding
        return list(finding.addresses) if finding.reached in (Reached.PUBLIC, Reached.MAPPED) else []

    async def shutdown(self) -> None:
        """As `close`, and end all connections of `node`."""
        await self.close()
        self.circuits.close()
        if self.relay is not None:
            self.relay.close()
        await self.node.close()
