"""What the tests of this folder share: processes that train, started once, and single peers in the test's process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import shoal
from shoal.optim import progress
from tests.optim.processes import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The peers of the pool are processes of their own."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.end()


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """An optimizer that is `verbose` sets it for the process."""
    logger = logging.getLogger("shoal")
    level = logger.level
    yield
    logger.setLevel(level)


Alone = Callable[..., shoal.Optimizer]


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


class Clock:
    """Stands in for `time`: how long a step takes is for the test to say, and not for the machine."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the progress tracker reads, from now on."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "get_dht_time", clock.monotonic)
    return clock
