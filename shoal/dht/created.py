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
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.sockets import SocketTransport

log = logging.getLogger(__name__)


class CreatedNode(DHTNode):
    """See `DHTNode`; made by `create`, with a transport of its own."""

    @classmethod
    async def create(
        cls,
        initial_peers: Sequence[Multiaddr | str] | None = None,
        *,
        host_maddrs: Sequence[Multiaddr | str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[Multiaddr | str] = (),
        identity: Identity | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool = False,
        record_validator: RecordValidator | None = None,
        validators: Iterable[RecordValidator] = (),
        wait_timeout: float = 3.0,
        bootstrap_timeout: float = 10.0,
        ensure_bootstrap_success: bool = True,
        upload_limit: float | None = None,
        download_limit: float | None = None,
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
            client_mode: see `DHTNode`.
            record_validator: a rule for records, for who has only one.
            validators: rules for records beside `SignatureValidator`, which every node has.
            wait_timeout: seconds until a node that does not answer counts as failed.
            bootstrap_timeout: seconds that the initial peers have to answer.
            ensure_bootstrap_success: if False, a node whom no initial peer answers goes on, and dials them again.
            upload_limit, download_limit: bytes per second that this node sends and receives at most; None for no limit.
            **options: see `DHTNode`.

        Raises:
            ValueError: for an address that can't be.
            PeerUnreachable: if no initial peer answers; names each, and why.
            OSError: if an address is taken, or the identity's file can't be read.
        """
        if identity is None:
            identity = Identity.from_file(identity_path) if identity_path is not None else Identity()
        rules = [*validators, *([record_validator] if record_validator is not None else [])]
        node = Node(identity, SocketTransport(identity, upload_limit=upload_limit, download_limit=download_limit))
        try:
            for address in map(Multiaddr, () if client_mode else host_maddrs):
                await node.listen(address)
            options |= {"client_mode": client_mode, "validators": rules, "request_timeout": wait_timeout}
            dht_node = cls(node, announce=list(map(Multiaddr, announce_maddrs)), **options)
            try:
                await dht_node.bootstrap(initial_peers or (), bootstrap_timeout)
            except PeerUnreachable as error:
                if ensure_bootstrap_success:
                    raise
                log.warning("%s", error)
        except BaseException:  # cancelled, too: the node must not go on listening
            await node.close()
            raise
        return dht_node

    async def shutdown(self) -> None:
        """As `close`, and end all connections of `node`."""
        await self.close()
        await self.node.close()
