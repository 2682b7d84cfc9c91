"""One Shoal peer whose way out is narrow. Arguments: rank, elements, bytes per second, declared bandwidth.

What it sends passes a token bucket before it reaches the transport. What it receives is not limited: in an all-reduce
each peer receives as much as it sends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import shoal
from benchmarks.workers.link import serve
from benchmarks.workers.shoal_averager import ShoalPeer
from shoal.p2p.identity import PeerID
from shoal.p2p.sockets import SocketTransport
from shoal.p2p.transport import Buffer

BURST = 1 << 18  # bytes that pass at once after a pause


class ThrottledPeer(ShoalPeer):
    """`ShoalPeer`, with a token bucket."""

    def __init__(self, elements: int, rate: float, bandwidth: float) -> None:
        super().__init__(elements, "none")
        self._bandwidth = bandwidth
        throttle(rate)

    def open(self, initial_peers: list[str]) -> list[str]:
        """As ShoalPeer, declaring the bandwidth."""
        self._dht = shoal.DHT(initial_peers=initial_peers, start=True)
        self._averager = shoal.DecentralizedAverager(
            [self.vector],
            self._dht,
            prefix="bench",
            target_group_size=4,
            min_matchmaking_time=5.0,
            bandwidth=self._bandwidth,
            start=True,
        )
        return [str(address) for address in self._dht.get_visible_maddrs()]


def throttle(rate: float) -> None:
    """From now on this process sends so many bytes per second."""
    original, free_at = SocketTransport.send, 0.0

    def send(self: Any, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = ()) -> None:
        nonlocal free_at
        loop = asyncio.get_running_loop()
        size = len(header) + sum(memoryview(buffer).nbytes for buffer in buffers)
        kept_header, kept = bytes(header), [bytes(buffer) for buffer in buffers]  # the caller may write them now
        for peer in peers:
            free_at = max(free_at, loop.time() - BURST / rate) + size / rate
            loop.call_at(max(free_at, loop.time()), original, self, [peer], kept_header, kept)

    SocketTransport.send = send  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, elements, rate, bandwidth = sys.argv[1:]
    serve(ThrottledPeer(int(elements), float(rate), float(bandwidth)), int(rank))
