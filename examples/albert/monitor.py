"""Watch a run from outside: joins the DHT, trains nothing, and prints what the peers publish.

python -m examples.albert.monitor --initial-peers /ip4/.../p2p/...
"""

from __future__ import annotations

import argparse
import time

import shoal
from examples.albert.metrics import Metrics, collect, rules


def summary(peers: list[Metrics]) -> str:
    """One line of what all peers together are at."""
    newest = max(peer.epoch for peer in peers)
    steps = sum(peer.steps for peer in peers)
    loss = sum(peer.loss for peer in peers) / max(1, steps)
    speed = sum(peer.samples_per_second for peer in peers)
    return f"epoch {newest}: {len(peers)} peers, {speed:.0f} windows/s, loss {loss:.3f}"


def main() -> None:
    """Prints a line for every new epoch, until the run is silent or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Watch the pretraining of ALBERT.")
    parser.add_argument("--initial-peers", nargs="+", action="extend", required=True, help="addresses of peers")
    parser.add_argument("--run-id", default="albert", help="name of the training run")
    parser.add_argument("--refresh", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--epochs", type=int, help="stop when the run has reached this epoch")
    arguments = parser.parse_args()
    with shoal.DHT(
        arguments.initial_peers, start=True, client_mode=True, record_validators=rules(arguments.run_id)
    ) as dht:
        shown = -1
        while arguments.epochs is None or shown < arguments.epochs:
            peers = collect(dht, arguments.run_id)
            newest = max((peer.epoch for peer in peers), default=-1)
            if newest > shown:
                shown = newest
                print(summary(peers), flush=True)
            time.sleep(arguments.refresh)


if __name__ == "__main__":
    main()
