"""What can be said of a peer at an address: whether it can be dialled, how far it is, and how fast the line is."""

from __future__ import annotations

import asyncio
import time

import msgspec

from shoal.cli.doctor.finding import Finding, Level
from shoal.dht.messages import SERVICE, Ping, Pong, Sender
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node, Service
from shoal.p2p.sockets import SocketTransport

PINGS = 5
ANSWER_SECONDS = 60.0
PIECE_BYTES, FIRST_PIECES, MORE_PIECES = 256 << 10, 1, 32
ENOUGH_SECONDS = 0.5  # that the first piece may take, and more follow
SLOW = 10e6 / 8  # bytes per second


class Load(msgspec.Struct, tag=0):
    """Bytes for a service that nobody has: a node drops such a notice as soon as it has come."""

    data: bytes


def judge_line(seconds: float, rate: float) -> list[Finding]:
    """What a round trip of so many seconds, and so many bytes a second to the peer, are good for."""
    far = Finding("round trip", Level.GOOD, f"{1000 * seconds:.1f} ms")
    says = f"{rate * 8 / 1e6:.0f} Mbit/s to that peer"
    if rate < SLOW:
        way = "send fewer bytes (grad_compression), less often (a larger target_batch_size, use_local_updates)"
        return [far, Finding("bandwidth", Level.POOR, says, way)]
    return [far, Finding("bandwidth", Level.GOOD, says)]


def judge_dial(address: Multiaddr, error: str) -> Finding:
    """Whether a peer answers at that address; `error` is "" if so."""
    if not error:
        return Finding("address", Level.GOOD, f"{address.with_peer(None)} answers, and is who it should be")
    way = "is it started, and on that address (not on loopback), and is its port open in firewall and router?"
    return Finding("address", Level.BAD, f"can't be dialled: {error}", way)


def examine_peer(address: Multiaddr) -> list[Finding]:
    """Dial it, and measure the line. `address` ends in a peer id."""
    return asyncio.run(_examine(address))


async def _examine(address: Multiaddr) -> list[Finding]:
    peer, identity = address.peer_id, Identity()
    assert peer is not None
    node = Node(identity, SocketTransport(identity))
    try:
        node.learn(peer, [address])
        await node.connect(peer)
        seconds = min([await _ping(node, peer) for _ in range(PINGS)])
        took = await _load(node, peer, FIRST_PIECES)
        rate = FIRST_PIECES * PIECE_BYTES / max(took - seconds, 1e-6)
        if took < ENOUGH_SECONDS:
            took = await _load(node, peer, MORE_PIECES)
            rate = MORE_PIECES * PIECE_BYTES / max(took - seconds, 1e-6)
    except (P2PError, TimeoutError) as error:
        return [judge_dial(address, str(error) or f"no answer within {ANSWER_SECONDS:.0f} s")]
    finally:
        await node.close()
    return [judge_dial(address, ""), *judge_line(seconds, rate)]


async def _ping(node: Node, peer: PeerID) -> float:
    began = time.perf_counter()
    await node.call(peer, SERVICE, Ping(Sender(True, ())), Pong, timeout=ANSWER_SECONDS)
    return time.perf_counter() - began


async def _load(node: Node, peer: PeerID, pieces: int) -> float:
    """Seconds until so many pieces have come: messages keep their order, and the answer follows them."""
    began = time.perf_counter()
    for _ in range(pieces):
        node.notify([peer], Service("doctor", Load), Load(bytes(PIECE_BYTES)))
    await _ping(node, peer)
    return time.perf_counter() - began
