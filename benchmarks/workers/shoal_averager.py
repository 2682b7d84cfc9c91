"""One Shoal peer: a DHT and a DecentralizedAverager. Arguments: rank, elements, codec."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import shoal
from benchmarks.workers.link import serve

CODECS: dict[str, shoal.compression.Codec] = {
    "none": shoal.compression.NoCompression(),
    "float16": shoal.compression.Float16Compression(),
    "uniform8bit": shoal.compression.Uniform8BitQuantization(),
    "blockwise8bit": shoal.compression.BlockwiseQuantization(),
}
TIMEOUT = 20.0  # seconds in which the round must be committed


class ShoalPeer:
    """`link.Peer` for Shoal."""

    def __init__(self, elements: int, codec: str) -> None:
        self.vector = torch.empty(elements)
        self._codec = CODECS[codec]

    def open(self, initial_peers: list[str]) -> list[str]:
        """Starts the reactor, the DHT node and the averager in this process."""
        self._dht = shoal.DHT(initial_peers=initial_peers, start=True)
        self._join()
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def _join(self) -> None:
        self._averager = shoal.DecentralizedAverager(
            [self.vector],
            self._dht,
            prefix="bench",
            target_group_size=None,
            min_matchmaking_time=2.0,
            compression=self._codec,
            start=True,
        )

    def connect(self, addresses: list[list[str]]) -> None:
        """Nothing to do: peers find each other in the DHT."""

    def round(self) -> dict[str, Any]:
        """One step, without retries, so that a failed round shows; the averager says when BEGIN came."""
        started = time.monotonic()
        self._averager.step(timeout=TIMEOUT, allow_retries=False)
        seconds = time.monotonic() - started
        last = self._averager.last_round
        assert last is not None
        return {
            "members": len(last.members),
            "matchmaking": last.matchmaking_seconds,
            "allreduce": seconds - last.matchmaking_seconds,  # until the mean is in the tensor, after COMMIT
            "join_to_begin": last.join_to_begin_seconds,
            "bytes_sent": last.bytes_sent,
            "bytes_received": last.bytes_received,
        }

    def close(self) -> None:
        """Shuts both down, as far as they were started."""
        for name in ("_averager", "_dht"):
            if hasattr(self, name):
                getattr(self, name).shutdown()


if __name__ == "__main__":
    rank, elements, codec = sys.argv[1:]
    serve(ShoalPeer(int(elements), codec), int(rank))
