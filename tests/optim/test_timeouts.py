"""Every timeout bounds what its name says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model

pytestmark = pytest.mark.processes

Peers = list[shoal.Optimizer]


@contextlib.contextmanager
def peers(dht: shoal.DHT, count: int = 2, **arguments: Any) -> Iterator[Peers]:
    """The peers of one run, in this process."""
    given = {"run_id": "timeouts", "target_batch_size": 64, "optimizer": OPTIMIZERS["sgd"], **arguments}
    with contextlib.ExitStack() as stack:
        places = [dht]
        places += [stack.enter_context(shoal.DHT(dht.get_visible_maddrs(), start=True)) for _ in range(count - 1)]
        made: Peers = []
        for place in places:
            model = make_model()
            backward(model, *fixed_batch(0))
            made.append(shoal.Optimizer(dht=place, params=model.parameters(), **given))
            stack.callback(made[-1].shutdown)
        yield made


@pytest.mark.long
def test_matchmaking_time(dht: shoal.DHT) -> None:
    """A member that does not come is waited for no longer than this."""
    with peers(dht, matchmaking_time=1.0, averaging_timeout=30.0) as (first, second):
        began = time.monotonic()
        first.step(batch_size=64)  # the other's trainer is busy elsewhere
        assert 1.0 <= time.monotonic() - began < 25.0
        assert first.local_epoch == 1
        assert second.local_epoch == 0


def deafen(optimizer: shoal.Optimizer) -> None:
    """It joins rounds, and then neither takes nor sends a chunk."""
    swarm = optimizer._run.swarm
    swarm.peer.participant.on_chunk = lambda *_: None  # type: ignore[method-assign]

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    swarm._enter = never  # type: ignore[method-assign, assignment]


def together(optimizers: Peers, well: shoal.Optimizer) -> float:
    """The round of all; how long it took until `well` had a result."""

    def steps(optimizer: shoal.Optimizer) -> float:
        began = time.monotonic()
        optimizer.step(batch_size=32)
        while well.local_epoch == 0 and time.monotonic() - began < 30:
            optimizer.step(batch_size=0)
        return time.monotonic() - began

    with ThreadPoolExecutor(len(optimizers)) as threads:
        times = list(threads.map(steps, optimizers))
    return times[optimizers.index(well)]


@pytest.mark.long
def test_next_chunk_timeout(dht: shoal.DHT) -> None:
    """One that stalls is left out after so long, and the round is the others'."""
    times = {"next_chunk_timeout": 2.0, "allreduce_timeout": 40.0, "averaging_timeout": 40.0}
    with peers(dht, 3, target_batch_size=96, **times) as optimizers:
        found: list[Any] = []
        optimizers[0].on_event = found.append
        deafen(optimizers[2])
        assert 1.9 <= together(optimizers, optimizers[0]) < 30.0
        assert [type(event) for event in found] == [shoal.EpochReport]


@pytest.mark.long
def test_allreduce_timeout(dht: shoal.DHT, caplog: pytest.LogCaptureFixture) -> None:
    """A round that does not get on is given up, and another tried."""
    times = {"next_chunk_timeout": 60.0, "allreduce_timeout": 1.5, "averaging_timeout": 10.0}
    with peers(dht, **times) as optimizers, caplog.at_level(logging.WARNING, "shoal"):
        deafen(optimizers[1])
        assert 1.4 <= together(optimizers, optimizers[0]) < 25.0
    assert "the round has made no progress for 1.5 s: trying again" in caplog.text


@pytest.mark.long
def test_averaging_timeout(dht: shoal.DHT, caplog: pytest.LogCaptureFixture) -> None:
    with (
        peers(dht, matchmaking_time=60.0, averaging_timeout=1.5) as (first, _),
        caplog.at_level(logging.WARNING, "shoal"),
    ):
        began = time.monotonic()
        first.step(batch_size=64)
        assert 1.5 <= time.monotonic() - began < 40.0
    assert re.search(r"no result within \d+(\.\d+)? s", caplog.text)


def test_load_state_timeout(dht: shoal.DHT) -> None:
    with peers(dht, load_state_timeout=1.0) as (first, second):

        async def never() -> Any:
            await asyncio.Event().wait()

        first._donors._donors[0]._take_snapshot = never
        began = time.monotonic()
        with pytest.raises(shoal.AveragingError, match="no part of a state has arrived for 1 s"):
            second.load_state_from_peers()
        assert 0.9 <= time.monotonic() - began < 40.0


@pytest.mark.long
def test_shutdown_timeout(dht: shoal.DHT, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="shutdown",
        target_batch_size=64,
        params=make_model().parameters(),
        optimizer=OPTIMIZERS["sgd"],
        shutdown_timeout=0.5,
    )
    over = threading.Event()
    dht.reactor.loop.call_soon_threadsafe(over.wait, 100.0)  # it hangs
    began = time.monotonic()
    try:
        with caplog.at_level(logging.WARNING, "shoal"):
            optimizer.shutdown()
        assert 0.4 <= time.monotonic() - began < 50.0
    finally:
        over.set()
    assert "leaving the run took longer than 0.5 s" in caplog.text


def test_options_of_the_averaging_are_forwarded(dht: shoal.DHT) -> None:
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="forwarded",
        target_batch_size=64,
        params=make_model().parameters(),
        optimizer=OPTIMIZERS["sgd"],
        averager_opts={
            "bandwidth": 7.0,
            "request_timeout": 2.5,
            "min_matchmaking_time": 0.5,
            "next_chunk_timeout": 1.25,
            "sender_timeout": 1.75,
            "reducer_timeout": 2.25,
        },
        tracker_opts={"min_refresh_period": 0.25},
    )
    swarm = optimizer._run.swarm
    silence = swarm.peer.participant.silence
    assert swarm.me.bandwidth == 7.0
    assert swarm._request_timeout == 2.5
    assert swarm.rules.matchmaking_time == 0.5
    assert optimizer._settings.next_chunk_timeout == 1.25
    assert (silence.sender_timeout, silence.reducer_timeout) == (1.75, 2.25)
    assert optimizer.tracker._reports._refresh.min_refresh_period == 0.25
    optimizer.shutdown()
