"""What it costs trainers that they are watched: measured on peers that do nothing else meanwhile.

On a machine that has nothing else to do (`uptime` says less than 0.3; two cores are enough), which takes a minute:

    .venv/bin/python -m pytest -s tests/monitor/test_cost.py

It prints the share of a core and the bytes a second, and fails from 0.5 % or 2 kB/s on.
"""

from __future__ import annotations

import threading

import pytest

import shoal
from shoal.monitor import Watcher
from tests.monitor.processes import Trainers, trainers
from tests.peers import ask_all
from tests.workers.monitored import Monitored, Spent

pytestmark = [pytest.mark.timed, pytest.mark.long]

SECONDS = 20.0
MAX_SHARE = 0.005  # of the CPU time of a trainer that keeps one core busy
MAX_BYTES = 2000.0  # a second


def spent(peers: Trainers) -> list[Spent]:
    return ask_all(peers.all, Monitored.spent)


def test_watching_costs_a_trainer_next_to_nothing() -> None:
    """Two runs of three peers, which are alike but for this: the peers of one publish nothing more after the start,
    those of the other publish every 10 s, and are watched."""
    with trainers(3, period=1e6) as unseen, trainers(3, period=10.0) as seen:
        with (
            shoal.DHT(seen.addresses, client_mode=True, start=True) as dht,
            Watcher(dht, "test") as watcher,
        ):
            assert watcher.wait_until_ready(60.0)
            before = spent(unseen), spent(seen)
            threading.Event().wait(SECONDS)
            after = spent(unseen), spent(seen)
            assert watcher.snapshot().sentence.startswith("3 of 3 peers")
        rates = {
            what: [
                sum(late[what] - early[what] for early, late in zip(*pair, strict=True)) / 3 / SECONDS
                for pair in zip(before, after, strict=True)
            ]
            for what in ("cpu", "bytes")
        }
    share, passed = (rates[what][1] - rates[what][0] for what in ("cpu", "bytes"))
    print(
        f"watching costs a trainer {share:.3%} of a core, and {passed:.0f} bytes a second both ways together ({rates})"
    )
    assert share < MAX_SHARE
    assert passed < MAX_BYTES
