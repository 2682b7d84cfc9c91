"""Sends messages of a run to its members, which are named by their keys."""

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


def loop_time() -> float:
    """The time of the running loop, in seconds."""
    return asyncio.get_running_loop().time()


class Channel:
    """Sends the messages of one service to other peers, which are named by their keys.

    Args:
        node: the node of this peer.
        service: the service whose messages are sent.
        gate: the gate of a closed run, whose messages go to members only; None for an open run.
        has_pins: whether tips may have pins of the run's owner.
    """

    def __init__(self, node: Node, service: Service, gate: Gate | None = None, *, has_pins: bool = False) -> None:
        self.node, self._service, self._gate, self._has_pins = node, service, gate, has_pins

    def notify(self, keys: Iterable[bytes], message: Struct, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        """Send `message` to those of these peers that are connected. Afterwards the caller may write to `buffers`
        again, unless they have a `name` (see `Transport.send`)."""
        if self._gate is not None:
            keys = self._gate.ready(keys)
        self.node.notify([peer_of(key) for key in keys], self._service, message, buffers, name)

    async def call(self, key: bytes, message: Struct, expect: type[Body], timeout: float) -> Body:
        """Send a request and return its reply, connecting first if need be. Raises what `Node.call` does."""
        await self.introduce(key, timeout)
        with self._noticing_refusals(key):
            return await self.node.call(peer_of(key), self._service, message, expect, timeout=timeout)

    async def ask(self, key: bytes, message: Struct, timeout: float, buffers: Sequence[Buffer] = ()) -> Reply:
        """Like `call`, for replies of several types, or with buffers."""
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
        """In a closed run, exchange memberships with that peer before the first message. Raises what `Gate.introduce`
        raises."""
        if self._gate is not None:
            await self._gate.introduce(peer_of(key), timeout)

    async def introduce_all(self, keys: Iterable[bytes], timeout: float) -> None:
        """Like `introduce`, with all of these peers that are connected. Errors are ignored: they come again where a
        caller waits for the peer."""
        if self._gate is not None:
            known = [key for key in keys if self.is_connected(key)]
            await asyncio.gather(*(self.introduce(key, timeout) for key in known), return_exceptions=True)

    def believes(self, tip: Tip) -> bool:
        """Whether such a tip can exist. One with a pin exists only if the run's owner has made that pin."""
        return not tip.pin or (self._gate is not None and self._has_pins and self._gate.believes(tip.pin))

    def is_connected(self, key: bytes) -> bool:
        """Whether a message to that peer can be sent now; always true of this peer itself."""
        return self.node.is_connected(peer_of(key))

    async def connect(self, timeouts: Mapping[bytes, float]) -> dict[bytes, str]:
        """Connect to these peers, all at the same time, since each dial may take as long as its time-out. Returns the
        peers that cannot be reached, each with the reason."""
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
        """Remember the addresses at which that member listens."""
        self.node.learn(member.peer, member.multiaddrs())
