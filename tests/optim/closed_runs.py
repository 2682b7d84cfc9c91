"""What the tests of closed runs share: an owner, identities, and a node that belongs to nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import shoal
from shoal.membership import OwnerKey, Part
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Envelope, Node
from shoal.p2p.sockets import SocketTransport
from shoal.swarm.gate import Gate
from shoal.swarm.gates import gate_of

_envelopes = msgspec.msgpack.Decoder(Envelope)


class Club:
    """A closed run in a test.

    Args:
        folder: for the identities of its peers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, OwnerKey("test")
        self.run_id = self.owner.run.run_id

    def identity(self, name: str) -> tuple[str, PeerID]:
        """The identity file of a peer, and the peer id in it."""
        path = str(self.folder / name)
        return path, Identity.from_file(path).peer_id

    def admit(self, peer: PeerID, *parts: Part, days: float = 1.0, ago: float = 0.0) -> str:
        """A membership that was issued so many seconds ago."""
        return self.owner.admit(peer, parts or (Part.TRAIN,), days, time.time() - ago)

    def gate(self, dht: shoal.DHT) -> Gate:
        """That of a node which is in the run."""
        gate = gate_of(dht.node, self.run_id)
        assert gate is not None
        return gate

    def run(self, names: Sequence[str], *parts: Part, **options: Any) -> dict[str, Any]:
        """Arguments of `training` for peers of these names, who may take these parts."""
        files, peers = zip(*map(self.identity, names), strict=True)
        given = [self.admit(peer, *parts) for peer in peers]
        return {"run_id": self.run_id, "identity": list(files), "membership": given, **options}


class Counting(Node):
    """A node that counts what comes to it from the services of a run: headers and buffers, in bytes."""

    def __init__(self, identity: Identity, run_id: str) -> None:
        self.run_id, self.nbytes, self.answers = run_id, 0, 0
        super().__init__(identity, SocketTransport(identity))

    def _on_message(self, peer: PeerID, header: memoryview, buffers: Sequence[memoryview]) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            if self.run_id in _envelopes.decode(header).service:
                self.nbytes += len(header) + sum(buffer.nbytes for buffer in buffers)
                self.answers += 1
        super()._on_message(peer, header, buffers)


@asynccontextmanager
async def stranger(address: str, run_id: str) -> AsyncIterator[tuple[Counting, PeerID]]:
    """A node of a new identity that is connected to that address; with the peer that it is connected to."""
    node = Counting(Identity(), run_id)
    try:
        where = Multiaddr(address)
        assert where.peer_id is not None
        node.learn(where.peer_id, [where])
        await node.connect(where.peer_id)
        yield node, where.peer_id
    finally:
        await node.close()
