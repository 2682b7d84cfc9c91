"""One peer of the measure, `benchmarks.sealed`. Arguments: rank, elements, elements of a chunk, all-reduce|one-way."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.sealed import SealedPeer
from benchmarks.workers.link import serve


class SealedAverager:
    """`link.Peer` for the measure: no DHT, no matchmaking, the group is whoever was opened.

    Args:
        one_way: the first peer sends its vector to the others, and nothing is averaged.
    """

    def __init__(self, rank: int, elements: int, chunk: int, one_way: bool) -> None:
        self.vector = torch.empty(elements)
        self._rank, self._one_way = rank, one_way
        self._sealed = SealedPeer(self.vector, chunk, one_owner=one_way)

    def open(self, initial_peers: list[str]) -> list[str]:
        """Listens."""
        return [str(self._sealed.listen())]

    def connect(self, addresses: list[list[str]]) -> None:
        """Dials and accepts all others."""
        self._size = len(addresses)
        self._sealed.connect(self._rank, [int(port) for (port,) in addresses])

    def round(self) -> dict[str, Any]:
        """One all-reduce, or one vector sent."""
        started = time.monotonic()
        if self._one_way:
            self._sealed.broadcast()
        else:
            self._sealed.all_reduce()
        return {"members": self._size, "matchmaking": 0.0, "allreduce": time.monotonic() - started}

    def close(self) -> None:
        """Ends the connections."""
        self._sealed.close()


if __name__ == "__main__":
    rank, elements, chunk, way = sys.argv[1:]
    serve(SealedAverager(int(rank), int(elements), int(chunk), one_way=way == "one-way"), int(rank))
