"""One Shoal peer whose way out is narrow. Arguments: rank, elements, bytes per second, declared bandwidth.

What it receives is not limited: in an all-reduce each peer receives as much as it sends.
"""

from __future__ import annotations

import sys

import shoal
from benchmarks.workers.link import serve
from benchmarks.workers.shoal_averager import ShoalPeer


class ThrottledPeer(ShoalPeer):
    """`ShoalPeer`, with an upload limit."""

    def __init__(self, elements: int, rate: float, bandwidth: float) -> None:
        super().__init__(elements, "none")
        self._rate, self._bandwidth = rate, bandwidth

    def open(self, initial_peers: list[str]) -> list[str]:
        """As ShoalPeer, declaring the bandwidth."""
        self._dht = shoal.DHT(initial_peers=initial_peers, start=True, upload_limit=self._rate)
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


if __name__ == "__main__":
    rank, elements, rate, bandwidth = sys.argv[1:]
    serve(ThrottledPeer(int(elements), float(rate), float(bandwidth)), int(rank))
