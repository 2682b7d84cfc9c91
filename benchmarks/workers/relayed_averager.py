"""One of four Shoal peers. Arguments: rank, elements, and "direct", or "relayed" if the last two are to be connected
through the first, which relays."""

from __future__ import annotations

import sys
from typing import Any

import torch

import shoal
from benchmarks.workers.link import serve
from benchmarks.workers.shoal_averager import ShoalPeer
from shoal.reach.finding import Reached, WayIn

RELAY, PUBLIC = 0, 1  # ranks


class RelayedPeer(ShoalPeer):
    """`link.Peer` for Shoal; ranks that are neither RELAY nor PUBLIC are reached through the relay only."""

    def __init__(self, rank: int, elements: int, relayed: bool) -> None:
        super().__init__(elements, "none")
        self._rank, self._relayed = rank, relayed

    def open(self, initial_peers: list[str]) -> list[str]:
        """See there."""
        self._dht = shoal.DHT(initial_peers=initial_peers, start=True, relay=self._rank == RELAY)
        if self._relayed:
            self._dht.run_coroutine(self._be_relayed)
        self._join()
        return [str(address) for address in self._dht.get_visible_maddrs()]

    async def _be_relayed(self, _dht: shoal.DHT, node: Any) -> None:
        node.circuits.on_dialled = lambda peer, address: None  # on one machine, every router lets everybody in
        if self._rank == PUBLIC:
            node.node.transport.router = None  # it is dialled
        elif self._rank != RELAY:
            circuits = await node.circuits.reserve()
            assert circuits
            await node.found(WayIn(Reached.RELAYED, tuple(circuits)), client_mode=True)


if __name__ == "__main__":
    rank, elements, how = sys.argv[1:]
    torch.set_num_threads(1)
    serve(RelayedPeer(int(rank), int(elements), how == "relayed"), int(rank))
