"""What holds for the whole suite: one compute thread per process, and nothing is left behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and inherited by every process that a test starts: four of them share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

import shoal
from shoal.swarm.protocol import peer as protocol_peer
from tests.few_cases import mark_the_others
from tests.forked import SETTLE_SECONDS
from tests.left_behind import nothing_left_behind as nothing_left_behind
from tests.optim.closed_runs import Club

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")


protocol_peer.SETTLE_SECONDS = 0.0  # of tests and of the processes that they fork, see forked.py


@pytest.fixture
def others_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of a run waits for peers that nobody has found yet, as it does for users. In other tests it does
    not: they start all their peers before one of them steps, or no peer alone reaches the target."""
    monkeypatch.setattr(protocol_peer, "SETTLE_SECONDS", SETTLE_SECONDS)


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """One that nobody else is in yet."""
    with shoal.DHT(start=True) as dht:
        yield dht


@pytest.fixture
def club(tmp_path: Path) -> Club:
    """The members of a closed run."""
    return Club(tmp_path)


@pytest.hookimpl(tryfirst=True)  # -m selects by what is marked here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:  # whoever names tests gets all their cases
        mark_the_others(items)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it whenever it is asked who refers to a
    tensor, as ContiguousParams do when they are made."""
    # The first step of an optimizer would import it, in whichever test that is. (xdist's controller collects nothing.)
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: pytest itself does at the end, which a run that is cut never comes to."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}", file=sys.stderr, flush=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread that never ends must not hold up the exit: then say where every thread is, and leave."""
    faulthandler.dump_traceback_later(60, exit=True)
