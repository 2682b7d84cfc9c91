"""Relays and peers that use them, on loopback: a peer that does not listen can't be dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node, Service
from shoal.p2p.sockets import SocketTransport
from shoal.reach.circuits import Circuits
from shoal.reach.relay import Relay
from tests.p2p.recorder import LOOPBACK


class Said(msgspec.Struct, tag=0, array_like=True, frozen=True):
    text: str


class Echo(msgspec.Struct, tag=1, array_like=True, frozen=True):
    text: str


CHAT = Service("chat", Said | Echo)


class End:
    """A peer with circuits; `heard` are the notices that came, as (peer, text, buffers), `lost` who was lost."""

    def __init__(self, seed: bytes | None = None, **options: Any) -> None:
        identity = Identity(seed)
        self.transport: Any = SocketTransport(identity, **options)
        self.node = Node(identity, self.transport)
        self.peer_id = identity.peer_id
        self.relays: list[PeerID] = []
        self.circuits = Circuits(self.node, self.transport, lambda: self.relays)
        self.heard: list[tuple[PeerID, str, list[memoryview]]] = []
        self.lost: list[PeerID] = []
        self.node.on_lost(lambda peer, _reason: self.lost.append(peer))
        self.node.serve(CHAT, self._on_chat)

    def _on_chat(self, peer: PeerID, said: Said | Echo, buffers: Sequence[memoryview]) -> Echo:
        self.heard.append((peer, said.text, list(buffers)))
        return Echo(said.text)

    @property
    def texts(self) -> list[str]:
        return [text for _, text, _ in self.heard]

    async def ask(self, other: End, text: str, timeout: float = 20.0) -> str:
        return (await self.node.call(other.peer_id, CHAT, Said(text), Echo, timeout=timeout)).text

    async def use(self, *relays: RelayEnd) -> None:
        """Connect to these, and be reached through them."""
        self.relays = [relay.peer_id for relay in relays]
        for relay in relays:
            self.node.learn(relay.peer_id, [relay.address])
            await self.node.connect(relay.peer_id)
        assert await self.circuits.reserve(), "no reservation"

    def route(self, other: End) -> str:
        """The kind of the way by which it has dialled that connected peer."""
        return type(self.transport._peers[other.peer_id].route).__name__

    async def close(self) -> None:
        self.circuits.close()
        await self.node.close()


class RelayEnd(End):
    """A peer that listens and relays."""

    def __init__(self, bandwidth: float | None = None) -> None:
        super().__init__()
        self.relay = Relay(self.node, self.transport, bandwidth)
        self.address: Multiaddr

    async def listen(self) -> RelayEnd:
        self.address = await self.node.listen(LOOPBACK)
        return self

    async def close(self) -> None:
        self.relay.close()
        await super().close()


@asynccontextmanager
async def ends(number: int, relays: int = 1, **options: Any) -> AsyncIterator[tuple[list[RelayEnd], list[End]]]:
    """So many relays, and peers that do not listen."""
    async with AsyncExitStack() as stack:
        at = []
        for _ in range(relays):
            relay = RelayEnd(**options)
            stack.push_async_callback(relay.close)
            at.append(await relay.listen())
        peers = [End() for _ in range(number)]
        for peer in peers:
            stack.push_async_callback(peer.close)
        yield at, peers


async def joined(one: End, other: End, *relays: RelayEnd) -> None:
    """`other` reserves, and `one` dials it through a relay."""
    await other.use(*relays)
    one.node.learn(other.peer_id, other.circuits.addresses)
    await one.node.connect(other.peer_id)
    async with asyncio.timeout(10):
        while not other.node.is_connected(one.peer_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
