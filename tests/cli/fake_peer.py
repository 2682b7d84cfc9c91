"""Peers that only pretend: they tell the demo what peers tell, without torch and without a swarm."""

from __future__ import annotations

import functools
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore

from shoal.cli.demo.script import DemoSettings

SECONDS_PER_EPOCH = 0.02


def fake_peer(
    how: str, parent: Connection, turns: Semaphore, index: int, addresses: list[str], settings: DemoSettings
) -> None:
    """``how``: "well", "crash" (peer 1 fails in epoch 3), "differ" (peer 1 has another digest in epoch 3), "deaf"
    (ignores SIGTERM)."""

    def tell(what: str, details: object, text: str = "") -> None:
        parent.send((what, time.monotonic(), details, text))

    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    odd, first = index == 1, settings.epochs * 3 // 5 if index == settings.peers else 0
    tell("listens", ["/ip4/127.0.0.1/tcp/1/p2p/id-0"])
    tell("ready", 2.4)
    turns.acquire()
    if first:
        tell("DownloadReport", {"epoch": first, "state_digest": f"digest {first}"}, "downloaded the state")
    if index == 0:
        tell("evaluated", (0, 4.6))
    for epoch in range(first, settings.epochs):
        time.sleep(SECONDS_PER_EPOCH)
        if how == "crash" and odd and epoch == 3:
            sys.exit("the fake peer fails as it was told")
        report = report_of(epoch, "other" if how == "differ" and odd and epoch == 3 else None)
        tell("EpochReport", report, f"epoch {epoch}, state {report['state_digest']}")
    if index == 0:
        tell("evaluated", (settings.epochs, 1.6), "held-out loss 1.600")
    tell("finished", "def f():" if index == 0 else "")
    turns.acquire()


def report_of(epoch: int, digest: str | None = None) -> dict[str, object]:
    """One peer's report of an epoch."""
    return {"epoch": epoch, "round_seconds": 0.2, "state_digest": digest or f"digest {epoch}"}


well, crash, differ, deaf = (functools.partial(fake_peer, how) for how in ("well", "crash", "differ", "deaf"))
