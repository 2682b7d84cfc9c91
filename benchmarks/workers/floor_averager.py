"""One peer of the bare all-reduce of `benchmarks.floor`. Arguments: rank, elements, codec."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.floor import BarePeer
from benchmarks.workers.link import serve


class FloorPeer:
    """`link.Peer` for the floor: no DHT, no matchmaking, the group is whoever was opened."""

    def __init__(self, rank: int, elements: int, codec: str) -> None:
        self.vector = torch.empty(elements)
        self._rank = rank
        self._bare = BarePeer(self.vector, half=codec == "float16")

    def open(self, initial_peers: list[str]) -> list[str]:
        """Listens."""
        return [self._bare.listen()]

    def connect(self, addresses: list[list[str]]) -> None:
        """Dials all others."""
        self._size = len(addresses)
        self._bare.dial(self._rank, [address for (address,) in addresses])

    def round(self) -> dict[str, Any]:
        """One all-reduce."""
        started = time.monotonic()
        self._bare.allreduce()
        return {
            "members": self._size,
            "matchmaking": 0.0,
            "allreduce": time.monotonic() - started,
            "bytes_sent": self._bare.bytes_sent,
            "bytes_received": self._bare.bytes_received,
        }

    def close(self) -> None:
        """Closes the sockets."""
        self._bare.close()


if __name__ == "__main__":
    rank, elements, codec = sys.argv[1:]
    serve(FloorPeer(int(rank), int(elements), codec), int(rank))
