"""What a circuit's benchmark consists of. Argument: "relay", or "end", which connects to a relay and sends or receives.

It answers JSON lines, as `benchmarks.workers.link` does, and imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.reactor import Reactor
from shoal.p2p.sockets import SocketTransport
from shoal.reach.messages import CIRCUIT, RELAY, Circuit, Incoming, Opened, Reserve, Reserved
from shoal.reach.relay import Relay

PIECE = 1 << 20


class RelayWorker:
    """A node that relays."""

    def open(self) -> str:
        """Listens; returns its address."""
        self._reactor = Reactor.acquire()
        return str(self._reactor.run(self._open()))

    async def _open(self) -> Multiaddr:
        identity = Identity()
        transport = SocketTransport(identity)
        self._node = Node(identity, transport)
        Relay(self._node, transport)
        return await self._node.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))


class EndWorker:
    """The end of a circuit, over a plain socket: what it costs is the kernel's."""

    def reserve(self, relay: str) -> str:
        """Is led to; returns its peer id."""
        self._reactor = Reactor.acquire()
        identity = Identity()
        self._tokens: asyncio.Queue[bytes] = asyncio.Queue()

        async def run() -> None:
            self._node = Node(identity, SocketTransport(identity))
            self._node.serve(CIRCUIT, self._on_incoming)
            self._relay = Multiaddr(relay)
            assert self._relay.peer_id is not None
            self._node.learn(self._relay.peer_id, [self._relay])
            await self._node.call(self._relay.peer_id, RELAY, Reserve(), Reserved, timeout=10)

        self._reactor.run(run())
        return str(identity.peer_id)

    def _on_incoming(self, _peer: PeerID, message: Incoming, _buffers: object) -> None:
        self._tokens.put_nowait(message.token)

    def dial(self, to: str) -> None:
        """Opens a circuit to that peer."""

        async def ask() -> bytes:
            relay = self._relay.peer_id
            assert relay is not None
            circuit = Circuit(PeerID.parse(to).key)
            return (await self._node.call(relay, RELAY, circuit, Opened, timeout=10)).token

        self._connect(self._reactor.run(ask()))

    def come(self) -> None:
        """Is the other end of it."""
        self._connect(self._reactor.run(self._tokens.get()))

    def _connect(self, token: bytes) -> None:
        self._socket = socket.create_connection((self._relay.host, self._relay.port))
        self._socket.sendall(token)

    def send(self, size: int) -> None:
        """Sends so many bytes."""
        piece = memoryview(bytearray(PIECE))
        for _ in range(size // PIECE):
            self._socket.sendall(piece)

    def receive(self, size: int) -> float:
        """Receives so many bytes; returns the seconds that they took."""
        memory = memoryview(bytearray(PIECE))
        left, started = size, 0.0
        while left:
            got = self._socket.recv_into(memory, min(left, PIECE))
            started = started or time.monotonic()
            left -= got
        return time.monotonic() - started


def main() -> None:
    """Answers commands until its input ends."""
    worker: Any = {"relay": RelayWorker, "end": EndWorker}[sys.argv[1]]()
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(worker, command.pop("command"))(**command)
        print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
