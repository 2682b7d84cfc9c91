"""``shoal node``: a DHT node that trains nothing, by which the peers of a swarm find each other."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

import shoal


def run_node(host_maddrs: list[str], initial_peers: list[str], identity: Path | None, console: Console) -> None:
    """Starts the node, prints one ``--initial-peers`` per address it can be reached at, and returns after Ctrl-C."""
    with shoal.DHT(
        initial_peers, start=True, host_maddrs=host_maddrs, identity_path=identity, client_mode=False
    ) as dht:
        listening = ", ".join(str(address.with_peer(None)) for address in dht.node.addresses)
        console.print(
            f"This node listens on {listening} until Ctrl-C. Others join it with", markup=False, soft_wrap=True
        )
        for address in dht.get_visible_maddrs():
            console.print(f"--initial-peers {address}", markup=False, highlight=False, soft_wrap=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("stopped")
