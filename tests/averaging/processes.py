"""Averagers as real processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.peers import Worker, outcomes, workers
from tests.workers.averager import Averager, Round

Peer = Worker[Averager]


def running(count: int, elements: int, **options: Any) -> AbstractContextManager[list[Peer]]:
    """`count` of them that have met, with a vector of `elements` float32; killed at the end if they are still there."""
    return workers(Averager, count, elements=elements, options=options)


def all_round(peers: list[Peer], values: list[float] | None = None, **options: Any) -> list[Round | None]:
    """One round of all peers, the i-th with a vector full of `values[i]` (i by default); what came of it at each."""
    each = zip(peers, values or map(float, range(len(peers))), strict=True)
    return outcomes([peer.tell(Averager.round, value, **options) for peer, value in each])
