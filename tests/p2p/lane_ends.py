"""Two ends of lanes over loopback, and one that a test plays itself, byte by byte."""

from __future__ import annotations

import gc
import os
import queue
import socket
from functools import partial
from typing import NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.p2p.greeting import TOKEN_BYTES
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Lane
from shoal.p2p.leases import Leases
from shoal.p2p.limit import Limit
from shoal.p2p.sealing import NAME_BYTES, SEALED_HEADER_BYTES, Header, LaneKeys, Opener, Sealer, Suite, sealed_bytes
from shoal.p2p.shared import MEMORY_BYTES, Shared

HELLO = Header(0, bytes(NAME_BYTES), b"shoal lane 1")
PATIENCE = 30.0


def name(number: int) -> bytes:
    """Of the chunk with that number."""
    return number.to_bytes(NAME_BYTES, "big")


def both_keys(suite: Suite = AESGCM) -> tuple[LaneKeys, LaneKeys]:
    """Of the two sides of a connection."""
    one, other = os.urandom(32), os.urandom(32)
    return LaneKeys(suite, one, other), LaneKeys(suite, other, one)


class Arrival(NamedTuple):
    """A chunk that has come, from whom."""

    peer: PeerID
    message: bytes
    memory: memoryview


class End:
    """A peer's lanes, and what they tell: `arrivals`, and `lost` as (peer, reason)."""

    def __init__(self, number: int, upload: float | None = None, download: float | None = None) -> None:
        self.peer = PeerID(bytes([number]) * 32)
        self.shared = Shared(Leases(), Limit(upload), Limit(download))
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[tuple[PeerID, str]] = queue.SimpleQueue()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.lanes: list[Lane] = []

    def lane(self, peer: PeerID) -> Lane:
        """A new lane, without connections."""

        def opened(why_not: str) -> None:
            if why_not:
                lane.end(why_not)

        lane = Lane(peer, self.shared, partial(self._came, peer), lambda why: self.lost.put((peer, why)), opened)
        self.lanes.append(lane)
        return lane

    def _came(self, peer: PeerID, message: bytes, memory: memoryview) -> None:
        self.arrivals.put(Arrival(peer, message, memory))

    def accept(self, lane: Lane, keys: LaneKeys) -> None:
        """Let the next connection in, whose token is not looked at."""
        accepted, _ = self.listener.accept()
        accepted.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        lane.accept(accepted, keys)

    def arrival(self) -> Arrival:
        return self.arrivals.get(timeout=PATIENCE)

    def loss(self) -> str:
        """Why the lane was lost; it was said once."""
        _, reason = self.lost.get(timeout=PATIENCE)
        return reason

    def send(self, lane: Lane, number: int, data: bytes | bytearray | memoryview) -> None:
        """Send chunk `number`."""
        assert lane.send(name(number), b"chunk %d" % number, memoryview(data))

    @property
    def out(self) -> int:
        """Bytes of the pool that somebody refers to."""
        gc.collect()
        probe = self.shared.buffers.take(1)  # what has come back is counted then
        assert probe is not None
        return MEMORY_BYTES - self.shared.buffers._left - len(memoryview(probe.obj))

    def close(self) -> None:
        for lane in self.lanes:
            lane.end()
            lane.join()
        self.listener.close()

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(near: End, far: End, connections: int = 1, suite: Suite = AESGCM) -> tuple[Lane, Lane]:
    """A lane between two ends; the first of them dials."""
    ours, theirs = near.lane(far.peer), far.lane(near.peer)
    for _ in range(connections):
        near_keys, far_keys = both_keys(suite)
        ours.dial(far.listener.getsockname(), os.urandom(TOKEN_BYTES), near_keys)
        far.accept(theirs, far_keys)
    return ours, theirs


class Raw:
    """The other side of a lane of `end`, which a test plays: it dials, and greets."""

    def __init__(self, end: End, peer: PeerID, *, greets: bool = True) -> None:
        self.lane = end.lane(peer)
        near_keys, far_keys = both_keys()
        self.sealer, self.opener = (
            Sealer(near_keys.suite, near_keys.sealing),
            Opener(near_keys.suite, near_keys.opening),
        )
        self.socket = socket.create_connection(end.listener.getsockname())
        self.socket.sendall(os.urandom(TOKEN_BYTES))
        end.accept(self.lane, far_keys)
        if greets:
            self.socket.sendall(self.frame(HELLO, b""))
            assert self.receive() == HELLO

    def frame(self, header: Header, payload: bytes) -> bytes:
        sealed = bytearray(sealed_bytes(len(payload)))
        self.sealer.seal(header._replace(size=len(payload)), memoryview(payload), memoryview(sealed))
        return bytes(sealed)

    def chunk(self, number: int, payload: bytes) -> bytes:
        """The frame of a chunk."""
        return self.frame(Header(0, name(number), b""), payload)

    def receive(self) -> Header:
        sealed = bytearray()
        while len(sealed) < SEALED_HEADER_BYTES:
            got = self.socket.recv(SEALED_HEADER_BYTES - len(sealed))
            assert got
            sealed += got
        return self.opener.header(memoryview(sealed))

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
