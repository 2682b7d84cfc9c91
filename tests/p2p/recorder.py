"""A transport whose events are written down, and real loopback ends for the tests of this room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import Transport

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")


class Recorder:
    """Keeps what a transport reports: `messages` as (sender, header, buffers), `lost` as (peer, reason)."""

    def __init__(self, transport: Transport) -> None:
        self.transport: Any = transport  # of which some tests look into the inside
        self.messages: list[tuple[PeerID, bytes, list[bytes]]] = []
        self.lost: list[tuple[PeerID, str]] = []
        self.order: list[str] = []
        self._changed = asyncio.Event()
        transport.start(self._on_message, self._on_lost)

    def _on_message(self, peer, header, buffers):
        self.messages.append((peer, bytes(header), [bytes(buffer) for buffer in buffers]))
        self.order.append("message")
        self._changed.set()

    def _on_lost(self, peer, reason):
        self.lost.append((peer, reason))
        self.order.append("lost")
        self._changed.set()

    @property
    def headers(self) -> list[bytes]:
        return [header for _, header, _ in self.messages]

    async def until(self, condition: Callable[[], object], timeout: float = 60.0) -> None:
        """Wait for a condition that a message or a loss makes true."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_messages(self, number: int, timeout: float = 60.0) -> None:
        await self.until(lambda: len(self.messages) >= number, timeout)

    async def until_lost(self, peer: PeerID, timeout: float = 60.0) -> str:
        await self.until(lambda: peer in [lost for lost, _ in self.lost], timeout)
        return next(reason for lost, reason in self.lost if lost == peer)


@asynccontextmanager
async def sockets(*seeds: bytes | None) -> AsyncIterator[list[Recorder]]:
    """So many ends with sockets under them, as there are seeds of identities; closed at the end."""
    ends = [Recorder(SocketTransport(Identity(seed))) for seed in seeds]
    try:
        yield ends
    finally:
        await asyncio.gather(*(end.transport.close() for end in ends))


async def eventually(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def deafen(end: Recorder) -> None:
    """Have it hear nothing over the links that it has, as if its machine were gone."""
    for link in end.transport._links:
        asyncio.get_running_loop().remove_reader(link.socket)


def hear(end: Recorder) -> None:
    """Have it hear again."""
    for link in end.transport._links:
        link.resume()
