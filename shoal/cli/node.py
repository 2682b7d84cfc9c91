"""``shoal node``: a DHT node that trains nothing, through which the peers of a swarm find each other."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

import shoal


def run_node(
    host_maddrs: list[str],
    initial_peers: list[str],
    identity: Path | None,
    console: Console,
    *,
    relay: bool = False,
    relay_bandwidth: float | None = None,
) -> None:
    """Start the node, print one ``--initial-peers`` for each address at which it can be reached, and return after
    Ctrl-C.
    """
    with shoal.DHT(
        initial_peers=initial_peers,
        start=True,
        host_maddrs=host_maddrs,
        identity_path=identity,
        relay=relay,
        relay_bandwidth=relay_bandwidth,
        client_mode=False,
    ) as dht:
        listening = ", ".join(str(address.with_peer(None)) for address in dht.node.addresses)
        console.print(
            f"This node listens on {listening} until Ctrl-C. Others join it with", markup=False, soft_wrap=True
        )
        for address in dht.get_visible_maddrs():
            console.print(f"--initial-peers {address}", markup=False, highlight=False, soft_wrap=True)
        if relay:
            console.print("Peers that nobody can dial are reached through it: see docs/guides/relays.md", markup=False)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("stopped")
