"""What the tests of this folder share: processes that train, started once, and single peers in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import shoal
from tests.optim.processes import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.end()


Alone = Callable[..., shoal.Optimizer]


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    with shoal.DHT(start=True) as dht:
        yield dht


@pytest.fixture
def alone(dht: shoal.DHT) -> Iterator[Alone]:
    """Makes optimizers of runs with one peer, in this process: alone(model, **arguments)."""
    made: list[shoal.Optimizer] = []

    def make(model: nn.Module, **arguments: Any) -> shoal.Optimizer:
        given = {"dht": dht, "run_id": f"alone {len(made)}", "params": model.parameters(), **arguments}
        made.append(shoal.Optimizer(**given))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.shutdown()
