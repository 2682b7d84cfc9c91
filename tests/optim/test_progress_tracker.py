"""The tracker by itself: peers that come, go and watch, several in this process, each with its own DHT."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest

import shoal
from shoal.optim.progress_tracker import PATIENCE, ProgressTracker
from shoal.swarm.protocol.errors import Rejected
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

TARGET = 100
Make = Callable[..., ProgressTracker]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes trackers, each of another peer: make(**arguments)."""
    with ExitStack() as stack:
        known: list[shoal.DHT] = []

        def tracker(**arguments: object) -> ProgressTracker:
            given = {
                "target_batch_size": TARGET,
                "min_refresh_period": 0.05,
                "default_refresh_period": 0.05,
                "max_refresh_period": 0.2,
                **arguments,
            }
            client = bool(arguments.get("client_mode"))
            dht = stack.enter_context(
                shoal.DHT(known[0].get_visible_maddrs() if known else [], client_mode=client, start=True)
            )
            known.append(dht)
            made = ProgressTracker(dht, "test", **given)  # type: ignore[arg-type]
            stack.callback(made.shutdown)
            return made

        yield tracker


class Worker(threading.Thread):
    """Works in steps of `seconds` for `batch` samples each, until `stopped`."""

    def __init__(self, tracker: ProgressTracker, batch: int, seconds: float, epoch: int = 0) -> None:
        super().__init__(daemon=True)
        self.tracker, self.batch, self.seconds, self.epoch = tracker, batch, seconds, epoch
        self.stopped = False
        self.ends: list[tuple[int, float, float]] = []  # of epochs: their number, when, and its own samples in it

    def run(self) -> None:
        samples = 0
        while not self.stopped:
            time.sleep(self.seconds)
            samples += self.batch
            self.tracker.report_local_progress(self.epoch, samples)
            if self.tracker.ready_to_update_epoch:
                with self.tracker.pause_updates():
                    self.ends.append((self.epoch, time.monotonic(), samples))
                    self.epoch = self.tracker.update_epoch(max(self.epoch + 1, self.tracker.global_epoch))
                samples = 0


@pytest.mark.long
def test_peers_that_come_and_go(make: Make) -> None:
    watching = make()
    workers = [
        Worker(make(), 4, 0.08),
        Worker(make(client_mode=True), 5, 0.1),
        Worker(make(), 6, 0.09),
    ]
    times: dict[int, float] = {0: time.monotonic()}

    def watch_until(epoch: int) -> None:
        while watching.global_epoch < epoch:
            assert times[max(times)] > time.monotonic() - 60, "no epoch has ended for long"
            times.setdefault(watching.global_progress.epoch, time.monotonic())
            time.sleep(0.005)
        times.setdefault(epoch, time.monotonic())

    for worker in workers:
        worker.start()
    watch_until(3)
    fast = Worker(make(), 20, 0.1, epoch=watching.global_epoch)
    fast.start()
    joined = watching.global_epoch
    watch_until(joined + 4)
    assert watching.global_progress.num_clients == 1
    fast.stopped = True
    fast.join(60)
    fast.tracker.shutdown()
    left = watching.global_epoch
    watch_until(left + 3)
    for worker in workers:
        worker.stopped = True
        worker.join(60)
    lengths = {epoch: end - start for (epoch, start), (_, end) in pairwise(sorted(times.items()))}
    with_three, with_four = lengths[1], lengths[joined + 2]
    assert with_four < 0.75 * with_three, "one that does more than all others together was not counted"
    assert lengths[left + 1] > 1.3 * with_four, "one that left was waited for, or counted"
    speeds = [worker.tracker.performance_ema.samples_per_second for worker in (*workers, fast)]
    assert speeds[0] == pytest.approx(50, rel=0.3)
    assert speeds[3] > 2 * max(speeds[:3])
    assert watching.performance_ema.samples_per_second == 0.0
    assert watching.local_progress.samples_accumulated == 0
    for epoch in (1, 2):
        total = sum(samples for worker in workers for number, _, samples in worker.ends if number == epoch)
        assert TARGET <= total <= 1.1 * TARGET, f"epoch {epoch} had {total} samples"


def test_what_all_have_is_seen_by_all(make: Make) -> None:
    first, second = make(), make(client_mode=True)
    assert first.local_progress.peer_id == first.dht.peer_id
    assert (first.local_progress.client_mode, second.local_progress.client_mode) == (False, True)
    first.report_local_progress(0, 30)
    assert not first.ready_to_update_epoch
    wait_until(lambda: second.global_progress.samples_accumulated == 30)
    assert second.global_progress.num_peers == 1
    second.report_local_progress(0, 50)
    wait_until(lambda: first.global_progress.samples_accumulated == 80)
    assert first.global_progress.num_peers == 2
    assert first.estimated_next_update_time > shoal.get_dht_time() - 1
    first.report_local_progress(0, 20)  # ten were dropped
    wait_until(lambda: second.global_progress.samples_accumulated == 70)
    assert not second.ready_to_update_epoch
    first.report_local_progress(0, 60, update_global_samples=False)
    wait_until(lambda: first.ready_to_update_epoch and second.ready_to_update_epoch)
    with pytest.raises(RuntimeError, match="pause_updates"):
        first.update_epoch(1)
    with first.pause_updates():
        assert first.update_epoch() == 1
    assert not first.ready_to_update_epoch
    wait_until(lambda: second.global_epoch == 1)
    assert second.ready_to_update_epoch, "the other one has not begun the epoch yet"
    assert second.local_progress.epoch == 0
    with second.pause_updates():
        second.update_epoch(1)
    assert not second.ready_to_update_epoch
    wait_until(lambda: second.global_progress.samples_accumulated == 0)


def test_an_epoch_does_not_end_on_an_extrapolation(make: Make) -> None:
    """One that was fast, and then does nothing: its samples are expected, and are not there."""
    first, second = make(), make()
    for step in range(1, 5):
        time.sleep(0.02)
        first.report_local_progress(0, 10 * step)
    second.report_local_progress(0, 1)
    wait_until(lambda: second.global_progress.samples_accumulated == 41)
    time.sleep(0.5)  # at its speed it would have 250 more by now
    for step in (2, 3):
        second.report_local_progress(0, step)
        assert not second.ready_to_update_epoch
    assert not first.ready_to_update_epoch
    assert first.global_epoch == second.global_epoch == 0


def test_pausing(make: Make) -> None:
    first, second = make(), make()
    first.report_local_progress(0, 10)
    with second.pause_updates():
        with first.pause_updates():
            first.update_epoch(1)
        time.sleep(0.2)
        assert second.local_progress.epoch == 0
        assert second._run.swarm.tip.epoch == 0, "it has followed while it was paused"
    wait_until(lambda: second._run.swarm.tip.epoch == 1)


def test_one_peer_alone_never_waits(make: Make) -> None:
    tracker = make()
    started = time.monotonic()
    for samples in range(10, 100, 10):
        tracker.report_local_progress(0, samples)
        assert not tracker.ready_to_update_epoch
    tracker.report_local_progress(0, 100)
    assert tracker.ready_to_update_epoch
    assert time.monotonic() - started < PATIENCE / 2


def test_life(make: Make) -> None:
    tracker = make(start=False)
    assert not tracker.is_alive()
    with pytest.raises(RuntimeError, match="not running"):
        tracker.report_local_progress(0, 1)
    tracker.start()
    assert tracker.is_alive()
    tracker.report_local_progress(0, 1)
    tracker.shutdown()
    tracker.shutdown()
    assert not tracker.is_alive()
    with pytest.raises(RuntimeError, match="shut down"):
        tracker.report_local_progress(0, 2)


def test_arguments(make: Make) -> None:
    first = make()
    first.report_local_progress(0, 1)
    other = make(target_batch_size=7)
    refused = []

    def one_gives_way() -> bool:
        for tracker in (first, other):
            try:
                tracker.report_local_progress(0, 1)
            except Rejected as error:
                refused.append(str(error))
        return bool(refused)

    wait_until(one_gives_way)
    assert "target_batch_size is" in refused[0]
    for wrong in ({"target_batch_size": 0}, {"min_refresh_period": -1}, {"performance_ema_alpha": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).removeprefix("performance_ema_")):
            make(**wrong)
