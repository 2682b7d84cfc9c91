"""Two ends of lanes over loopback, and one that a test plays itself, byte by byte."""

from __future__ import annotations

import os
import queue
import socket
from typing import Any

from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Arrival, Lane, Lanes
from shoal.p2p.sealing import NAME_BYTES, SEALED_HEADER_BYTES, Header, Keys, Opener, Sealer, sealed_bytes
from shoal.p2p.tokens import TOKEN_BYTES

HELLO = Header(0, bytes(NAME_BYTES), b"shoal lane 1")
PATIENCE = 30.0


def name(number: int) -> bytes:
    """Of the chunk with that number."""
    return number.to_bytes(NAME_BYTES, "big")


def both_keys(suite: Any = "aes-256-gcm") -> tuple[Keys, Keys]:
    """Of the two sides of a connection."""
    one, other = os.urandom(32), os.urandom(32)
    return Keys(suite, one, other), Keys(suite, other, one)


class End:
    """A peer's lanes, and what they tell: `arrivals`, and `lost` as (peer, reason)."""

    def __init__(self, number: int, **options: Any) -> None:
        self.peer = PeerID(bytes([number]) * 32)
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[tuple[PeerID, str]] = queue.SimpleQueue()
        self.lanes = Lanes(self.arrivals.put, lambda peer, reason: self.lost.put((peer, reason)), **options)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def admit(self) -> bool:
        """Let the next connection in, if its token is good."""
        accepted, _ = self.listener.accept()
        return self.lanes.admit(accepted, accepted.recv(TOKEN_BYTES, socket.MSG_WAITALL))

    def arrival(self) -> Arrival:
        return self.arrivals.get(timeout=PATIENCE)

    def loss(self) -> str:
        """Why the lane was lost; it was said once."""
        _, reason = self.lost.get(timeout=PATIENCE)
        return reason

    def send(self, lane: Lane, number: int, data: bytes | bytearray | memoryview) -> queue.SimpleQueue[int]:
        """Send chunk `number`; returns where its number is put when its memory is free."""
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        assert lane.send(name(number), b"chunk %d" % number, memoryview(data), lambda: free.put(number))
        return free

    def close(self) -> None:
        self.lanes.close()
        self.listener.close()

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(near: End, far: End, connections: int = 1, suite: Any = "aes-256-gcm") -> tuple[Lane, Lane]:
    """A lane between two ends; the first of them dials."""
    ours, theirs = near.lanes.lane(far.peer), far.lanes.lane(near.peer)
    for _ in range(connections):
        near_keys, far_keys = both_keys(suite)
        token = far.lanes.invite(theirs, far_keys)
        ours.dial(far.listener.getsockname(), token, near_keys)
        assert far.admit()
    return ours, theirs


class Raw:
    """The other side of a lane of `end`, which a test plays: it dials, and greets."""

    def __init__(self, end: End, peer: PeerID, *, greets: bool = True) -> None:
        self.lane = end.lanes.lane(peer)
        near_keys, far_keys = both_keys()
        self.token = end.lanes.invite(self.lane, far_keys)
        self.sealer, self.opener = (
            Sealer(near_keys.suite, near_keys.sealing),
            Opener(near_keys.suite, near_keys.opening),
        )
        self.socket = socket.create_connection(end.listener.getsockname())
        self.socket.sendall(self.token)
        assert end.admit()
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
