"""One hivemind peer: a DHT and a DecentralizedAverager. Arguments: rank, elements, codec, known|unknown group size."""

from __future__ import annotations

import sys
import time
from typing import Any

import hivemind  # type: ignore[import-not-found, unused-ignore]
import torch

from benchmarks.workers.link import serve

GROUP_SIZE = 4
CODECS = {
    "none": hivemind.compression.NoCompression,
    "float16": hivemind.compression.Float16Compression,
    "uniform8bit": hivemind.compression.Uniform8BitQuantization,
    "blockwise8bit": hivemind.compression.BlockwiseQuantization,
}
TIMEOUT = 20.0  # seconds in which a group must be found


class StampedAverager(hivemind.averaging.DecentralizedAverager):  # type: ignore[misc, unused-ignore]
    """Notes when the all-reduce begins and ends: in the forked server, on a clock that all processes share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stamps = torch.zeros(2, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(*args, **kwargs)

    async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
        self.stamps[0] = time.monotonic()
        try:
            return await super()._aggregate_with_group(*args, **kwargs)
        finally:
            self.stamps[1] = time.monotonic()


class HivemindPeer:
    """`link.Peer` for hivemind."""

    def __init__(self, elements: int, codec: str, group_size_known: bool) -> None:
        self.vector = torch.empty(elements)
        self._codec = CODECS[codec]()
        self._target_group_size = GROUP_SIZE if group_size_known else None

    def open(self, initial_peers: list[str]) -> list[str]:
        """Starts the DHT's and the averager's processes and the Go daemon."""
        self._dht = hivemind.DHT(initial_peers=initial_peers, start=True)
        self._averager = StampedAverager(
            [self.vector],
            self._dht,
            prefix="bench",
            target_group_size=self._target_group_size,
            min_matchmaking_time=2.0,
            request_timeout=1.0,  # its documentation asks for less than min_matchmaking_time
            compression=self._codec,
            start=True,
        )
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def connect(self, addresses: list[list[str]]) -> None:
        """Nothing to do: peers find each other in the DHT."""

    def round(self) -> dict[str, Any]:
        """One step, without retries, so that a failed round shows."""
        started = time.monotonic()
        gathered = self._averager.step(timeout=TIMEOUT, allow_retries=False)
        begun, ended = self._averager.stamps.tolist()
        return {"members": len(gathered), "matchmaking": begun - started, "allreduce": ended - begun}

    def close(self) -> None:
        """Shuts both servers down, as far as they were started."""
        for name in ("_averager", "_dht"):
            if hasattr(self, name):
                getattr(self, name).shutdown()


if __name__ == "__main__":
    rank, elements, codec, group_size = sys.argv[1:]
    serve(HivemindPeer(int(elements), codec, group_size == "known"), int(rank))
