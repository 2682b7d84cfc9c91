"""A script may wait for other peers before it trains: the tracker soon knows of the first."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import shoal


def test_who_waits_for_another_peer_soon_sees_it() -> None:
    def make(dht: shoal.DHT) -> Any:
        return shoal.Optimizer(
            dht=dht,
            run_id="company",
            params=nn.Linear(2, 2).parameters(),
            target_batch_size=8,
            batch_size_per_step=4,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )

    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        made = [make(first), make(second)]
        until = time.monotonic() + 5  # the trackers of peers that do not train ask every 10 s otherwise
        while any(each.tracker.global_progress.num_peers < 2 for each in made):
            assert time.monotonic() < until
            time.sleep(0.05)
        for each in made:
            each.shutdown()
