"""What a circuit's benchmark consists of. Argument: "relay", or "end", which connects to a relay and sends or receives.

It answers JSON lines, as `benchmarks.workers.link` does, and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from shoal.p2p.errors import P2PError
from shoal.p2p.greeting import CIRCUIT_BYTE, TOKEN_BYTES
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

    def flood(self, to: str, circuits: int, connections: int) -> int:
        """Asks for so many circuits to that peer, and comes to those that it gets. Opens so many more connections: half
        of them say nothing, and half come with a token that nobody knows. Those that the relay closes are opened again
        every second, until `calm`. Returns how many circuits it got."""
        self._floods = threading.Event()
        self._held = self._reactor.run(self._ask_for(PeerID.parse(to), circuits))
        self._flooding = threading.Thread(target=self._keep_open, args=(connections,), daemon=True)
        self._flooding.start()
        return len(self._held)

    def calm(self) -> None:
        """Ends that."""
        self._floods.set()
        self._flooding.join()
        for connection in self._held:
            connection.close()

    async def _ask_for(self, to: PeerID, number: int) -> list[socket.socket]:
        relay = self._relay.peer_id
        assert relay is not None
        held = []
        for _ in range(number):
            with contextlib.suppress(P2PError):
                opened = await self._node.call(relay, RELAY, Circuit(to.key), Opened, timeout=10)
                held.append(socket.create_connection((self._relay.host, self._relay.port)))
                held[-1].sendall(opened.token)
        return held

    def _keep_open(self, number: int) -> None:
        where = self._relay.host, self._relay.port
        kept: list[socket.socket] = []
        while not self._floods.is_set():
            living = [connection for connection in kept if not is_closed(connection)]
            for connection in set(kept) - set(living):
                connection.close()
            while len(living) < number:
                living.append(socket.create_connection(where))
                if len(living) % 2:
                    living[-1].sendall(CIRCUIT_BYTE + os.urandom(TOKEN_BYTES - 1))
            kept = living
            self._floods.wait(1)
        for connection in kept:
            connection.close()

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


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended that connection, which sends nothing."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    """Answers commands until its input ends."""
    worker: Any = {"relay": RelayWorker, "end": EndWorker}[sys.argv[1]]()
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(worker, command.pop("command"))(**command)
        print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
