"""Peers that only pretend: they tell the demo what peers tell, without torch and without a swarm."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from shoal.cli.demo.settings import DemoSettings

SECONDS_PER_EPOCH = 0.02


def fake_peer(
    how: str, parent: Connection, index: int, run_id: str, addresses: list[str], settings: DemoSettings
) -> None:
    """``how``: "well", "crash" (peer 1 fails in epoch 3), "differ" (peer 1 has another digest in epoch 3), "deaf"
    (ignores SIGTERM)."""

    def tell(what: str, details: object) -> None:
        parent.send((what, time.monotonic(), details))

    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    odd, first = index == 1, settings.epochs * 3 // 5 if index == settings.peers else 0
    tell("listens", [f"id-{index}", "/ip4/127.0.0.1/tcp/1/p2p/id-0"])
    tell("ready", 2.4 if index == 0 else None)
    parent.recv()
    is_over = threading.Event()

    def wait() -> None:
        try:
            parent.recv()
            is_over.set()
        except EOFError:
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    if first:
        download = {"epoch": first, "seconds": 0.1, "bytes": 4e6, "donors": 3, "state_digest": f"digest {first}"}
        tell("DownloadReport", download)
    if index == 0:
        tell("evaluated", (0, 4.6))
    for epoch in range(first, settings.epochs):
        time.sleep(SECONDS_PER_EPOCH)
        if how == "crash" and odd and epoch == 3:
            sys.exit("the fake peer fails as it was told")
        tell("EpochReport", report_of(epoch, "other" if how == "differ" and odd and epoch == 3 else None))
        tell("trained", (epoch, 3.0, 100.0))
    if index == 0:
        tell("evaluated", (settings.epochs, 1.6))
    tell("finished", "def f():" if index == 0 else "")
    is_over.wait()


def report_of(epoch: int, digest: str | None = None) -> dict[str, object]:
    """One peer's report of an epoch."""
    return {
        "epoch": epoch,
        "samples": 128.0,
        "num_peers": 4,
        "coordinator": "id-2",
        "round_seconds": 0.2,
        "matchmaking_seconds": 0.01,
        "allreduce_seconds": 0.15,
        "bytes_sent": 4_000_000,
        "bytes_received": 4_000_000,
        "state_digest": digest or f"digest {epoch}",
    }


well, crash, differ, deaf = (functools.partial(fake_peer, how) for how in ("well", "crash", "differ", "deaf"))
