"""What one peer says to the others of its run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.transport import Buffer
from shoal.swarm.protocol.view import Member

Body = TypeVar("Body", bound=Struct)


class Channel:
    """One service of a node, to peers that are known by their keys, as messages and members name them.

    Args:
        node: this peer.
        service: whose messages go here.
    """

    def __init__(self, node: Node, service: Service) -> None:
        self.node, self._service = node, service

    def notify(self, keys: Iterable[bytes], message: Struct, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        """Send `message` to those of these peers that are connected. On return the caller may write to `buffers` again,
        but not to one with a `name` (see `Transport.send`)."""
        self.node.notify([PeerID(key) for key in keys], self._service, message, buffers, name)

    async def call(self, key: bytes, message: Struct, expect: type[Body], timeout: float) -> Body:
        """Send a request and return its reply, connecting first if need be. Raises what `Node.call` does."""
        return await self.node.call(PeerID(key), self._service, message, expect, timeout=timeout)

    async def ask(self, key: bytes, message: Struct, timeout: float, buffers: Sequence[Buffer] = ()) -> Reply:
        """As `call`, for replies of several kinds, or with buffers."""
        return await self.node.call_for_buffers(PeerID(key), self._service, message, timeout=timeout, buffers=buffers)

    def is_connected(self, key: bytes) -> bool:
        """Whether a message to that peer can be sent now; always true of this peer itself."""
        return self.node.is_connected(PeerID(key))

    async def connect(self, timeouts: Mapping[bytes, float]) -> dict[bytes, str]:
        """Connect to these peers, all at once, since each dial may take as long as its time-out. Returns those that
        cannot be reached, each with the reason."""
        failed: dict[bytes, str] = {}

        async def dial(key: bytes, timeout: float) -> None:
            try:
                await self.node.connect(PeerID(key), timeout)
            except P2PError as error:
                failed[key] = str(error)

        await asyncio.gather(*(dial(key, timeout) for key, timeout in timeouts.items()))
        return failed

    def learn(self, member: Member) -> None:
        """Remember where that member listens."""
        self.node.learn(member.peer, member.multiaddrs())
