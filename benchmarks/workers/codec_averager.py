"""One peer that does what a codec does in a round, and nothing else. Arguments: rank, elements, codec, group size.

In a round each member encodes the parts that the others own and the mean of its own, adds up what it decodes of the
others' parts, and copies what it decodes of all means into place. Here it does that with chunks of its own, in one
thread, while the other peers do the same.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.sealed import CHUNK
from benchmarks.workers.link import answer, fill, run_round
from benchmarks.workers.shoal_averager import CODECS


class CodecPeer:
    """`link.Peer` as far as it needs to be: what it averages is nothing."""

    def __init__(self, elements: int, codec: str, group_size: int) -> None:
        self.vector = torch.empty(elements)
        self._codec, self._size = CODECS[codec], group_size
        self._sums, self._out = torch.zeros(elements), torch.zeros(elements)

    def open(self, initial_peers: list[str]) -> list[str]:
        """Nothing to do."""
        return []

    def connect(self, addresses: list[list[str]]) -> None:
        """Nothing to do."""

    def round(self) -> dict[str, Any]:
        """The codec's share of one round."""
        started = time.monotonic()
        chunks, sums, means = (torch.split(cut, CHUNK) for cut in (self.vector, self._sums, self._out))
        mine = range(0, len(chunks), self._size)
        encoded = [self._codec.encode(chunk) for chunk in chunks]  # parts for others, and as many means as are missing
        for number in mine:
            for _ in range(self._size - 1):
                sums[number].add_(self._decoded(encoded[number], chunks[number]), alpha=1 / self._size)
        for number, chunk in enumerate(chunks):
            means[number].copy_(self._decoded(encoded[number], chunk))
        return {"members": self._size, "matchmaking": 0.0, "allreduce": time.monotonic() - started}

    def _decoded(self, payload: memoryview, chunk: torch.Tensor) -> torch.Tensor:
        return self._codec.decode(payload, chunk.dtype, chunk.numel())

    def close(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Answers until stdin ends."""
    rank, elements, codec, group_size = sys.argv[1:]
    peer = CodecPeer(int(elements), codec, int(group_size))

    def handle(command: str, **arguments: Any) -> Any:
        match command:
            case "open":
                return peer.open(**arguments)
            case "connect":
                return peer.connect(**arguments)
            case "fill":
                return fill(peer.vector, int(rank))
            case "round":
                return run_round(peer, **arguments)
            case "digest" | "error":
                return 0.0  # it averages nothing
        raise ValueError(f"no command is named {command!r}")

    answer(handle, peer.close)


if __name__ == "__main__":
    main()
