"""What one peer says to the others of its run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from msgspec import Struct

from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import peer_of
from shoal.p2p.node import Node, Reply, Service
from shoal.p2p.transport import Buffer
from shoal.swarm.gate import REFUSAL, Gate
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member

Body = TypeVar("Body", bound=Struct)


class Channel:
    """One service of a node, to peers that are known by their keys, as messages and members name them.

    Args:
        node: this peer.
        service: whose messages go here.
        gate: of a closed run, whose messages go to members only; None: of an open one.
        has_pins: whether tips may have the pins of the run's owner.
    """

    def __init__(self, node: Node, service: Service, gate: Gate | None = None, *, has_pins: bool = False) -> None:
        self.node, self._service, self._gate, self._has_pins = node, service, gate, has_pins

    def notify(self, keys: Iterable[bytes], message: Struct, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        """Send `message` to those of these peers that are connected. On return the caller may write to `buffers` again,
        but not to one with a `name` (see `Transport.send`)."""
        if self._gate is not None:
            keys = self._gate.ready(keys)
        self.node.notify([peer_of(key) for key in keys], self._service, message, buffers, name)

    async def call(self, key: bytes, message: Struct, expect: type[Body], timeout: float) -> Body:
        """Send a request and return its reply, connecting first if need be. Raises what `Node.call` does."""
        await self.introduce(key, timeout)
        with self._noticing_refusals(key):
            return await self.node.call(peer_of(key), self._service, message, expect, timeout=timeout)

    async def ask(self, key: bytes, message: Struct, timeout: float, buffers: Sequence[Buffer] = ()) -> Reply:
        """As `call`, for replies of several kinds, or with buffers."""
        await self.introduce(key, timeout)
        peer = peer_of(key)
        with self._noticing_refusals(key):
            return await self.node.call_for_buffers(peer, self._service, message, timeout=timeout, buffers=buffers)

    @contextmanager
    def _noticing_refusals(self, key: bytes) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            if self._gate is not None and str(error) == REFUSAL:
                self._gate.refused(peer_of(key))
            raise

    async def introduce(self, key: bytes, timeout: float) -> None:
        """In a closed run, show each other the memberships before the first message. Raises as `Gate.introduce`."""
        if self._gate is not None:
            await self._gate.introduce(peer_of(key), timeout)

    async def introduce_all(self, keys: Iterable[bytes], timeout: float) -> None:
        """As `introduce`, of those that are connected. What fails will fail again, where somebody waits for it."""
        if self._gate is not None:
            known = [key for key in keys if self.is_connected(key)]
            await asyncio.gather(*(self.introduce(key, timeout) for key in known), return_exceptions=True)

    def believes(self, tip: Tip) -> bool:
        """Whether there can be such a tip: only an owner pins states."""
        return not tip.pin or (self._gate is not None and self._has_pins and self._gate.believes(tip.pin))

    def is_connected(self, key: bytes) -> bool:
        """Whether a message to that peer can be sent now; always true of this peer itself."""
        return self.node.is_connected(peer_of(key))

    async def connect(self, timeouts: Mapping[bytes, float]) -> dict[bytes, str]:
        """Connect to these peers, all at once, since each dial may take as long as its time-out. Returns those that
        cannot be reached, each with the reason."""
        failed: dict[bytes, str] = {}

        async def dial(key: bytes, timeout: float) -> None:
            try:
                await self.node.connect(peer_of(key), timeout)
                await self.introduce(key, timeout)
            except (P2PError, TimeoutError) as error:
                failed[key] = str(error) or "no answer in time"

        await asyncio.gather(*(dial(key, timeout) for key, timeout in timeouts.items()))
        return failed

    def learn(self, member: Member) -> None:
        """Remember where that member listens."""
        self.node.learn(member.peer, member.multiaddrs())
