"""The progress tracker: what it estimates, and when it makes the trainer wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.optim.progress import Refresh, RunProgress, _Outbox, _Reports, refresh_of
from shoal.p2p.errors import PeerLost
from shoal.p2p.reactor import Reactor
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.messages import Count, Progress
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Role
from tests.optim.conftest import Clock
from tests.waiting import wait_until

GENESIS = Tip.genesis("run")


class FakeRun:
    """Answers reports: with `others` samples beside those reported, when `open` is set."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.swarm = self.dht = self.peer = self.view = self  # the fake stands for all of them
        self.tip = GENESIS
        self.behind: Tip | None = None
        self.called = False
        self.me = Member(bytes(32), ("/ip4/127.0.0.1/tcp/1",), Role.NODE)
        self.rules = Rules((), matchmaking_time=0.5, round_timeout=1.0)
        self.others, self.others_rate, self.others_under_way, self.peers = 0.0, 0.0, 0.0, 1
        self.waits: list[float] = []  # what it says to those who ask
        self.reports: list[float] = []
        self.asked: list[float] = []
        self.heard: list[Progress] = []
        self.due = asyncio.Event()
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def num_clients(self) -> int:
        return 0

    def connected(self) -> list[Member]:
        return [self.me]

    async def report(self, report: Progress) -> Count:
        self.heard.append(report)
        (self.asked if report.asks else self.reports).append(report.samples)  # last: it is what the tests wait for
        await asyncio.to_thread(self.open.wait, 60)
        if self.error is not None:
            raise self.error
        self.called = report.samples + self.others >= 100
        wait = self.waits.pop(0) if report.asks and self.waits else 0.0
        samples, rate = report.samples + self.others, report.rate + self.others_rate
        return Count(self.tip, samples, rate, self.peers, self.called, self.others_under_way, wait)

    async def news(self) -> None:
        await self.due.wait()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this is set, what need not be told at once is not told: the moment for which it is kept lasts so long."""
    over = threading.Event()
    original = _Reports.tell_later

    async def later(self: _Reports, outbox: _Outbox) -> None:
        await asyncio.to_thread(over.wait, 60)
        await original(self, outbox)

    monkeypatch.setattr(_Reports, "tell_later", later)
    return over


@pytest.fixture
def swarm() -> Iterator[FakeRun]:
    reactor = Reactor.acquire()
    swarm = FakeRun(reactor)
    try:
        yield swarm
    finally:
        swarm.open.set()
        reactor.release()


@pytest.fixture
def tracker(swarm: FakeRun) -> RunProgress:
    return RunProgress(swarm, 100, Refresh())  # type: ignore[arg-type]


def wait_for(reports: list[float], expected: list[float]) -> None:
    deadline = time.monotonic() + 60
    while reports != expected:
        assert time.monotonic() < deadline, reports
        time.sleep(0.001)


def test_waits_only_when_the_answer_can_matter(swarm: FakeRun, tracker: RunProgress) -> None:
    swarm.others, swarm.peers = 40.0, 3
    tracker.report(0.0)  # nothing is known yet: waits
    assert tracker.global_progress.samples_accumulated == 40
    assert tracker.global_progress.num_peers == 3
    swarm.open.clear()
    tracker.report(10.0)  # 50 of 100, and nobody else goes on: returns although nobody answers
    wait_for(swarm.reports, [0.0, 10.0])
    for samples in (20.0, 30.0):
        tracker.report(samples)  # one report is under way at a time
    assert tracker.global_progress.samples_accumulated == 70
    assert not tracker.ready_to_update_epoch
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(tracker.report, 60.0)  # the target is reached: waits for the coordinator
        wait_until(lambda: tracker._reports._latest is not None and tracker._reports._latest.samples == 60.0)
        time.sleep(0.1)
        assert not last.done()
        swarm.open.set()
        last.result(60)
    assert tracker.ready_to_update_epoch
    assert (swarm.reports, swarm.asked) == ([0.0, 10.0], [60.0]), "what came meanwhile is reported at once"


def test_the_others_go_on_while_nothing_is_heard_of_them(swarm: FakeRun, tracker: RunProgress, clock: Clock) -> None:
    swarm.others, swarm.others_rate = 40.0, 200.0
    tracker.report(0.0)
    assert tracker.estimated_next_update_time == pytest.approx(clock.now + 60 / 200, abs=1e-6)
    clock.sleep(0.1)
    assert tracker.estimated_next_update_time == pytest.approx(clock.now + 40 / 200, abs=1e-6)
    clock.sleep(0.3)  # by now they should have the 60 that are missing
    assert tracker.estimated_next_update_time == clock.now
    swarm.others = 99.0
    tracker.report(0.0)  # waits, for it may be so
    assert swarm.reports == [0.0, 0.0]
    assert tracker.global_progress.samples_accumulated == 99
    assert not tracker.ready_to_update_epoch, "an estimate does not end an epoch"


def test_nothing_is_estimated_without_a_rate(tracker: RunProgress) -> None:
    assert tracker.estimated_next_update_time == float("inf")


def test_who_trains_is_one_of_the_peers_before_it_is_counted(swarm: FakeRun, tracker: RunProgress) -> None:
    assert tracker.global_progress.num_peers == 0, "it has not trained yet"
    for samples in (10.0, 20.0):
        tracker.report(samples)
    swarm.tip = GENESIS.after(bytes(32), 100.0)
    swarm.open.clear()
    assert tracker.global_progress.num_peers == 1
    tracker.start_epoch(swarm.tip)
    assert tracker.global_progress.num_peers == 1
    swarm.open.set()


def test_epochs(swarm: FakeRun, tracker: RunProgress) -> None:
    tracker.report(60.0)
    assert tracker.local_progress.samples_accumulated == 60
    next_tip = GENESIS.after(bytes(32), 100.0)
    swarm.tip = next_tip  # the round was held without this peer
    assert tracker.ready_to_update_epoch
    assert tracker.local_progress.epoch == 0
    assert tracker.global_epoch == 1
    tracker.report(70.0)
    assert (swarm.reports, swarm.asked) == ([], [60.0]), "samples of an epoch that is over were reported"
    tracker.start_epoch(next_tip)
    wait_for(swarm.reports, [0.0])  # the coordinator of the new epoch hears that a step is under way
    assert (swarm.heard[-1].tip, swarm.heard[-1].step) == (next_tip, 10.0)
    assert not tracker.ready_to_update_epoch
    assert tracker.local_progress.epoch == 1
    assert tracker.global_progress.samples_accumulated == 0
    swarm.behind = next_tip.after(bytes(32), 900.0).after(bytes(32), 900.0)
    assert tracker.global_epoch == 3


@pytest.mark.parametrize("error", [PeerLost("gone"), TimeoutError()])
def test_a_lost_coordinator_is_no_error(swarm: FakeRun, tracker: RunProgress, error: Exception) -> None:
    swarm.error = error
    tracker.report(10.0)
    swarm.error = None
    tracker.report(20.0)
    assert swarm.asked == [10.0, 20.0]
    assert tracker.global_progress.samples_accumulated == 20


def test_being_behind_is_told_even_if_the_report_was_not_waited_for(swarm: FakeRun, tracker: RunProgress) -> None:
    tracker.report(0.0)
    swarm.error = Behind("the swarm is at epoch 5")
    tracker.report(1.0)
    pending = tracker._pending
    assert pending is not None
    wait_until(pending.done)
    assert swarm.reports == [0.0, 1.0]
    with pytest.raises(Behind, match="epoch 5"):
        tracker.report(2.0)


def test_one_that_is_told_to_wait_waits_for_the_call(swarm: FakeRun, tracker: RunProgress, clock: Clock) -> None:
    swarm.rules = Rules((), matchmaking_time=60.0, round_timeout=1.0)
    swarm.others, swarm.others_under_way, swarm.peers = 80.0, 16.0, 3
    tracker.report(0.0)
    clock.sleep(0.3)
    swarm.waits = [30.0] * 1000
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tracker.report, 8.0)  # 88 of 100, and 16 will come without it
        wait_until(lambda: bool(swarm.asked))
        time.sleep(0.1)
        assert set(swarm.asked) == {8.0}
        assert not waiting.done()
        assert swarm.heard[-1].step == 8.0
        assert swarm.heard[-1].seconds == pytest.approx(0.3)
        clock.sleep(5.0)
        swarm.others, swarm.called = 96.0, True
        tracker._reactor.loop.call_soon_threadsafe(swarm.due.set)
        waiting.result(60)
    assert tracker.ready_to_update_epoch
    tracker.start_epoch(GENESIS.after(bytes(32), 100.0))
    assert tracker.performance_ema.samples_per_second == pytest.approx(8 / 0.3), "waiting is not working slowly"


def test_what_passed_before_the_first_report_is_no_measure_of_a_step(
    swarm: FakeRun, tracker: RunProgress, clock: Clock
) -> None:
    """One that came late, or waited for its data, would be taken for too slow to help."""
    clock.sleep(0.3)
    tracker.report(8.0)
    assert (swarm.heard[-1].step, tracker.performance_ema.num_updates) == (0.0, 0)
    clock.sleep(0.05)
    tracker.report(16.0)
    wait_until(lambda: swarm.heard[-1].samples == 16.0)
    assert swarm.heard[-1].seconds == pytest.approx(0.05)


def test_what_it_waits_for_may_not_come(swarm: FakeRun, tracker: RunProgress, clock: Clock) -> None:
    swarm.others, swarm.others_under_way, swarm.peers = 80.0, 16.0, 3
    tracker.report(0.0)
    clock.sleep(0.1)
    swarm.waits = [30.0, 30.0, 0.0]
    tracker.report(8.0)  # the coordinator counts on the others, and then does not any more
    assert swarm.asked == [8.0, 8.0, 8.0]


def test_one_that_counts_on_others_for_ever_is_not_obeyed_for_ever(swarm: FakeRun, tracker: RunProgress) -> None:
    swarm.others, swarm.others_under_way, swarm.peers = 80.0, 16.0, 3
    tracker.report(0.0)
    time.sleep(0.1)
    swarm.waits = [30.0] * 1000
    started = time.monotonic()
    tracker.report(16.0)
    assert 0.3 <= time.monotonic() - started < 30
    assert len(swarm.asked) < 20, "it asks once in a step's time"
    assert not swarm.heard[-1].asks, "it says that it begins"
    assert not tracker.ready_to_update_epoch


def test_far_from_the_target_nothing_is_asked(swarm: FakeRun, tracker: RunProgress) -> None:
    swarm.others, swarm.others_under_way, swarm.peers = 10.0, 16.0, 3
    tracker.report(0.0)
    swarm.waits = [30.0] * 10
    tracker.report(8.0)
    wait_for(swarm.reports, [0.0, 8.0])
    tracker.report(8.0)  # nothing was added: no step follows
    wait_for(swarm.reports, [0.0, 8.0, 8.0])
    assert [report.step for report in swarm.heard] == [0.0, 8.0, 0.0]
    assert swarm.asked == []


def test_what_cannot_matter_yet_is_told_together(
    swarm: FakeRun, tracker: RunProgress, clock: Clock, kept: threading.Event
) -> None:
    tracker.report(0.0)
    for samples in range(1, 41):
        clock.sleep(0.001)
        tracker.report(float(samples))
    assert swarm.reports == [0.0]
    kept.set()
    wait_until(lambda: tracker.global_progress.samples_accumulated == 40 and len(swarm.reports) > 1)
    assert swarm.reports == [0.0, 40.0]


def test_near_the_target_everything_is_told(swarm: FakeRun, tracker: RunProgress, clock: Clock) -> None:
    """Else the others would go on as if this peer had nothing."""
    swarm.others = 69.0
    tracker.report(0.0)
    for samples in range(1, 10):
        clock.sleep(0.002)  # at 1,000 a second the 31 that are missing take 31 ms, and soon is 20
        tracker.report(2.0 * samples)
        assert (tracker._outbox.report is None) == (samples > 5)


def test_what_was_kept_is_not_told_after_what_came_later(
    swarm: FakeRun, tracker: RunProgress, clock: Clock, kept: threading.Event
) -> None:
    tracker.report(0.0)
    clock.sleep(0.1)
    tracker.report(8.0)
    later = tracker._pending
    assert later is not None
    swarm.others = 90.0
    tracker.report(101.0)  # told at once: the target is reached
    kept.set()
    later.result(60)
    assert (swarm.reports, swarm.asked) == ([0.0], [101.0])


def test_one_that_has_left_tells_nothing(
    swarm: FakeRun, tracker: RunProgress, clock: Clock, kept: threading.Event
) -> None:
    tracker.report(0.0)
    clock.sleep(0.1)
    tracker.report(8.0)
    later = tracker._pending
    assert later is not None
    tracker.stop()
    kept.set()
    later.result(60)
    assert swarm.reports == [0.0]


def test_one_that_may_not_wait_does_not(swarm: FakeRun) -> None:
    tracker = RunProgress(swarm, 100, Refresh(), may_wait=False)  # type: ignore[arg-type]
    swarm.others, swarm.others_under_way, swarm.waits = 80.0, 16.0, [30.0] * 10
    for samples in (0.0, 8.0, 16.0):
        tracker.report(samples)
    assert swarm.asked == []


def test_what_others_have_is_asked_for_when_there_is_nothing_to_report(swarm: FakeRun) -> None:
    tracker = RunProgress(swarm, 100, refresh=Refresh(0.05, 0.1, 0.05))  # type: ignore[arg-type]
    try:
        swarm.others, swarm.peers = 40.0, 3
        tracker.start()
        wait_until(lambda: tracker.global_progress.samples_accumulated == 40)
        assert not any(report.counted for report in swarm.heard)
        assert tracker.global_progress.num_peers == 3
        tracker.report(8.0)
        swarm.others = 50.0
        wait_until(lambda: tracker.global_progress.samples_accumulated == 58)
        assert swarm.heard[-1].counted
        tracker.stop()
        tracker._reactor.run(asyncio.sleep(0))  # it has heard of that
        wait_until(lambda: tracker._reports._looking is None or tracker._reports._looking.done())
        before = len(swarm.heard)
        time.sleep(0.3)
        assert len(swarm.heard) == before
    finally:
        tracker.stop()


def test_how_often_others_are_asked_for() -> None:
    refresh = Refresh()
    assert refresh.seconds(eta=8.0, peers=0) == 3.0
    assert refresh.seconds(eta=8.0, peers=3) == pytest.approx(8.0 * 3 / 6)
    assert refresh.seconds(eta=8.0, peers=30) == pytest.approx(8.0 * 30 / 36)
    assert refresh.seconds(eta=0.0, peers=3) == 0.5
    assert refresh.seconds(eta=float("inf"), peers=3) == 10.0


def test_options_of_the_reference() -> None:
    refresh = refresh_of({"min_refresh_period": 0.1, "expected_drift_rate": 1.0, "metadata_expiration": 60.0})
    assert refresh == Refresh(min_refresh_period=0.1, expected_drift_rate=1.0)
    assert refresh_of(None) == Refresh()
    with pytest.raises(ValueError, match="no option nonsense, period; there are min_refresh_period"):
        refresh_of({"period": 1, "nonsense": 2})
    with pytest.raises(ValueError, match="performance_ema_alpha: that is an argument of the optimizer"):
        refresh_of({"performance_ema_alpha": 0.5})
    with pytest.raises(ValueError, match="min_refresh_period=20 is more than max_refresh_period=10"):
        refresh_of({"min_refresh_period": 20})
    with pytest.raises(ValueError, match="expected_drift_peers=-1"):
        refresh_of({"expected_drift_peers": -1})


def test_a_coordinator_that_hangs_does_not_keep_the_trainer_from_a_round(swarm: FakeRun, tracker: RunProgress) -> None:
    """Another has taken its place, and called."""
    swarm.open.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tracker.report, 60.0)
        time.sleep(0.1)
        assert not waiting.done()
        swarm.called = True
        tracker._reactor.loop.call_soon_threadsafe(swarm.due.set)
        waiting.result(60)
    assert tracker.ready_to_update_epoch


def test_a_download_within_a_pause_takes_no_time_of_a_step(swarm: FakeRun, tracker: RunProgress, clock: Clock) -> None:
    """The pause counted twice once a download restarted the clock within it: the next step took less than no time, and
    everybody refused this peer's reports."""
    tracker.report(0.0)
    clock.sleep(0.3)
    with tracker.paused():
        clock.sleep(2.0)
        tracker.restart_clock()
        clock.sleep(1.0)
    clock.sleep(0.1)
    tracker.report(8.0)
    wait_until(lambda: swarm.heard[-1].samples == 8.0)
    assert swarm.heard[-1].seconds == pytest.approx(0.1)
    with tracker.paused():
        clock.sleep(2.0)
    clock.sleep(0.2)
    tracker.report(16.0)
    wait_until(lambda: swarm.heard[-1].samples == 16.0)
    assert swarm.heard[-1].seconds == pytest.approx(0.15), "the median of both steps"
