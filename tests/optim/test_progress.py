"""The progress tracker: what it estimates, and when it makes the trainer wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import shoal
from shoal.averaging.errors import Behind
from shoal.averaging.messages import Count
from shoal.averaging.tip import Tip
from shoal.optim.progress import PerformanceEMA, ProgressTracker
from shoal.p2p.errors import PeerLost
from shoal.p2p.reactor import Reactor

GENESIS = Tip.genesis("run")


class FakeSwarm:
    """Answers reports: with `others` samples beside those reported, when `open` is set."""

    def __init__(self) -> None:
        self.tip = GENESIS
        self.behind: Tip | None = None
        self.called = False
        self.others, self.others_rate, self.peers = 0.0, 0.0, 1
        self.reports: list[float] = []
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    async def report(self, samples: float, rate: float) -> Count:
        self.reports.append(samples)
        await asyncio.to_thread(self.open.wait, 10)
        if self.error is not None:
            raise self.error
        self.called = samples + self.others >= 100
        return Count(self.tip, samples + self.others, rate + self.others_rate, self.peers, self.called)


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm()


@pytest.fixture
def tracker(swarm: FakeSwarm) -> Iterator[ProgressTracker]:
    reactor = Reactor.acquire()
    try:
        yield ProgressTracker(swarm, reactor, 100)  # type: ignore[arg-type]
    finally:
        swarm.open.set()
        reactor.release()


def wait_for(reports: list[float], expected: list[float]) -> None:
    deadline = time.monotonic() + 5
    while reports != expected:
        assert time.monotonic() < deadline, reports
        time.sleep(0.001)


def test_moving_average_is_of_the_time_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    ema = PerformanceEMA(alpha=0.25)
    assert ema.samples_per_second == 0.0
    now += 2.0
    ema.update(4)
    assert ema.samples_per_second == pytest.approx(2.0)
    now += 1.0
    ema.update(10)
    assert ema.samples_per_second == pytest.approx(1 / (0.75 * 0.5 + 0.25 * 0.1))
    before = ema.samples_per_second
    now += 50.0
    ema.restart()
    now += 1.0
    ema.update(0)  # a step without samples says nothing of the speed
    now += 0.1
    ema.update(1)
    assert ema.samples_per_second == pytest.approx(1 / (0.75 / before + 0.25 * 0.1))


def test_waits_only_when_the_answer_can_matter(swarm: FakeSwarm, tracker: ProgressTracker) -> None:
    swarm.others, swarm.peers = 40.0, 3
    tracker.report_local_progress(0.0)  # nothing is known yet: waits
    assert tracker.global_progress.samples_accumulated == 40
    assert tracker.global_progress.num_peers == 3
    swarm.open.clear()
    tracker.report_local_progress(10.0)  # 50 of 100, and nobody else goes on: returns although nobody answers
    wait_for(swarm.reports, [0.0, 10.0])
    for samples in (20.0, 30.0):
        tracker.report_local_progress(samples)  # one report is under way at a time
    assert tracker.global_progress.samples_accumulated == 70
    assert not tracker.ready_to_update_epoch
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(tracker.report_local_progress, 60.0)  # the target is reached: waits for the coordinator
        time.sleep(0.1)
        assert not last.done()
        swarm.open.set()
        last.result(5)
    assert tracker.ready_to_update_epoch
    assert swarm.reports == [0.0, 10.0, 60.0], "what came meanwhile is reported at once"


def test_the_others_go_on_while_nothing_is_heard_of_them(swarm: FakeSwarm, tracker: ProgressTracker) -> None:
    swarm.others, swarm.others_rate = 40.0, 200.0
    tracker.report_local_progress(0.0)
    now = shoal.get_dht_time()
    assert tracker.estimated_next_update_time == pytest.approx(now + 60 / 200, abs=0.2)
    time.sleep(0.4)  # by now they should have the 60 that are missing
    assert tracker.estimated_next_update_time <= shoal.get_dht_time()
    swarm.others = 99.0
    tracker.report_local_progress(0.0)  # waits, for it may be so
    assert swarm.reports == [0.0, 0.0]
    assert tracker.global_progress.samples_accumulated == 99
    assert not tracker.ready_to_update_epoch, "an estimate does not end an epoch"


def test_nothing_is_estimated_without_a_rate(tracker: ProgressTracker) -> None:
    assert tracker.estimated_next_update_time == float("inf")


def test_epochs(swarm: FakeSwarm, tracker: ProgressTracker) -> None:
    tracker.report_local_progress(60.0)
    assert tracker.local_progress.samples_accumulated == 60
    next_tip = GENESIS.after(bytes(32), 100.0)
    swarm.tip = next_tip  # the round was held without this peer
    assert tracker.ready_to_update_epoch
    assert tracker.local_progress.epoch == 0
    assert tracker.global_epoch == 1
    tracker.report_local_progress(70.0)
    assert swarm.reports == [60.0], "samples of an epoch that is over were reported"
    tracker.start_epoch(next_tip)
    assert not tracker.ready_to_update_epoch
    assert tracker.local_progress.epoch == 1
    assert tracker.global_progress.samples_accumulated == 0
    swarm.behind = next_tip.after(bytes(32), 900.0).after(bytes(32), 900.0)
    assert tracker.global_epoch == 3


@pytest.mark.parametrize("error", [PeerLost("gone"), TimeoutError()])
def test_a_lost_coordinator_is_no_error(swarm: FakeSwarm, tracker: ProgressTracker, error: Exception) -> None:
    swarm.error = error
    tracker.report_local_progress(10.0)
    swarm.error = None
    tracker.report_local_progress(20.0)
    assert swarm.reports == [10.0, 20.0]
    assert tracker.global_progress.samples_accumulated == 20


def test_being_behind_is_told_even_if_the_report_was_not_waited_for(swarm: FakeSwarm, tracker: ProgressTracker) -> None:
    tracker.report_local_progress(0.0)
    swarm.error = Behind("the swarm is at epoch 5")
    tracker.report_local_progress(1.0)
    wait_for(swarm.reports, [0.0, 1.0])
    time.sleep(0.05)
    with pytest.raises(Behind, match="epoch 5"):
        tracker.report_local_progress(2.0)
