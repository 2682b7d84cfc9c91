"""A peer of the transport's soak as a process of its own: exchanges large messages with whom it is told to.

Obeys JSON lines on stdin, answers with JSON lines on stdout. It answers every large message with another one, so that a
few of them are under way between two peers for ever, in both directions; and it does so in rounds, which are counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node, Service
from shoal.p2p.sealing import NAME_BYTES
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import MAX_BUFFER_BYTES
from tests.soak.held import process_holds

PATTERN = memoryview(random.Random(0).randbytes(MAX_BUFFER_BYTES))
SIZES = (MAX_BUFFER_BYTES, MAX_BUFFER_BYTES, 3 << 20, 1 << 20, 100_000)
UNDER_WAY = 2  # large messages that a visitor begins with at each peer
PIECES = 4  # of 4 MiB, that each side sends in a round


class Large(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Send me one, too. `answers` is how many of yours I have had on this connection."""

    answers: int


class Piece(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """One of `PIECES` of that round."""

    round: int


SERVICE = Service("soak", Large | Piece)


class _Errors(logging.Handler):
    """Keeps what is logged as an error: asyncio logs what no task awaited, too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class Member:
    """One peer: what it sends, and what it counts."""

    def __init__(self, seed: int) -> None:
        identity = Identity(random.Random(seed).randbytes(32))
        self.node = Node(identity, SocketTransport(identity))
        self.node.serve(SERVICE, self._on_message)
        self.node.on_lost(self._on_lost)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._rng = random.Random(seed)
        self._names = 0
        self._sent: Counter[PeerID] = Counter()
        self._received: Counter[PeerID] = Counter()
        self._answered: dict[PeerID, int] = {}
        self._homes: list[PeerID] = []  # that it comes back to
        self._round, self._pieces = 0, 0
        self.in_rounds = False

    def post(self, peer: PeerID, message: Large | Piece, size: int) -> None:
        """Send a large message: the one place that says how."""
        self._names += 1
        name = self._names.to_bytes(NAME_BYTES)
        self.node.notify([peer], SERVICE, message, [PATTERN[:size]], name)

    def _on_message(self, peer: PeerID, message: Large | Piece, buffers: Any) -> None:
        self.counts["large"] += 1
        if len(buffers) != 1 or buffers[0] != PATTERN[: len(buffers[0])]:
            self.wrong.append(f"{message} of {peer} came with other bytes than were sent")
        if isinstance(message, Piece):
            self._on_piece(peer)
        else:
            self._received[peer] += 1
            self._answered[peer] = message.answers
            self._large(peer)

    def _large(self, peer: PeerID) -> None:
        self._sent[peer] += 1
        self.post(peer, Large(self._received[peer]), self._rng.choice(SIZES))

    def _on_piece(self, peer: PeerID) -> None:
        self._pieces += 1
        if self._pieces == PIECES:
            self._pieces = 0
            self.counts["rounds"] += 1
            if self.in_rounds:
                self.send_round(peer)

    def send_round(self, peer: PeerID) -> None:
        """This side's part of a round; the next follows when the other side's has come."""
        self._round += 1
        for _ in range(PIECES):
            self.post(peer, Piece(self._round), MAX_BUFFER_BYTES)

    def _on_lost(self, peer: PeerID, _reason: str) -> None:
        self.counts["lost"] += 1
        sent, answered = self._sent.pop(peer, 0), self._answered.pop(peer, 0)
        self._received.pop(peer, None)
        self.counts["cut"] += sent > answered  # one of ours was under way to it, or the answer to this side
        if peer in self._homes:
            self.node.spawn(self.visit(peer))

    async def visit(self, peer: PeerID) -> None:
        """Connect to a peer, and begin. Who is refused tries again."""
        while not self.node.closed:
            try:
                await self.node.connect(peer)
            except P2PError:
                await asyncio.sleep(0.05)  # until the other side has seen the end of the connection before
            else:
                break
        for _ in range(UNDER_WAY):
            self._large(peer)

    def disconnect(self, peer: PeerID) -> None:
        """End the connection, in the middle of whatever passes."""
        if self.node.transport.is_connected(peer):
            self.node.disconnect(peer, "the soak says so")

    async def command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the driver says."""
        match command["do"]:
            case "visit":
                for address in map(Multiaddr, command["addresses"]):
                    assert address.peer_id is not None
                    self.node.learn(address.peer_id, [address])
                    self._homes.append(address.peer_id)
                    await self.visit(address.peer_id)
            case "disconnect":
                self.disconnect(PeerID.parse(command["peer"]))
            case "meet":
                address = Multiaddr(command["address"])
                assert address.peer_id is not None
                self.node.learn(address.peer_id, [address])
                await self.node.connect(address.peer_id)
            case "rounds":
                self.in_rounds = command["on"]
                if self.in_rounds:
                    self.send_round(PeerID.parse(command["peer"]))
            case "leave":
                self._homes.clear()
                await self.node.close()
        return {"ok": True}

    def state(self) -> dict[str, Any]:
        """What it holds, and what it has counted."""
        transport: Any = self.node.transport
        return {
            **process_holds(),
            "tasks": len(asyncio.all_tasks()),
            "links": len(transport._links),
            "lanes": len(transport._lanes.beside),
            "names": sorted(thread.name for thread in threading.enumerate()),
            **{key: self.counts[key] for key in ("large", "rounds", "lost", "cut")},
        }


async def main() -> None:
    options = json.loads(sys.argv[1])
    # One thread reads stdin. The default executor may start another, which would count as left.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "stdin"))
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    threading.excepthook = lambda failure: errors.texts.append(f"in a thread: {failure.exc_value!r}")
    member = Member(options["seed"])
    address = await member.node.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
    print(json.dumps({"addresses": [str(address)], "peer": str(member.node.peer_id)}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "state":
            answer = member.state() | {"errors": errors.texts[:20], "wrong": member.wrong[:20]}
        elif command["do"] == "count":
            answer = {"rounds": member.counts["rounds"], "cpu": time.process_time()}
        else:
            answer = await member.command(command)
        print(json.dumps(answer), flush=True)
        if command["do"] == "leave":
            return


if __name__ == "__main__":
    asyncio.run(main())
