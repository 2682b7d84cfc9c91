"""The schedule of faults of `benchmarks.goodput`, and its sums."""

from __future__ import annotations

import pytest

from benchmarks.goodput_figures import KINDS, Fault, Life, loss_beside, measure, schedule, share_there


def test_a_seed_makes_a_schedule_in_which_a_replica_suffers_one_fault_at_a_time() -> None:
    kinds = list(KINDS.values())
    faults = schedule(kinds, replicas=4, seconds=300.0, every=6.0, seed=1)
    assert faults == schedule(kinds, replicas=4, seconds=300.0, every=6.0, seed=1)
    assert faults != schedule(kinds, replicas=4, seconds=300.0, every=6.0, seed=2)
    assert {fault.kind for fault in faults} == set(kinds)
    for number, fault in enumerate(faults):
        later = [other for other in faults[number + 1 :] if other.replica == fault.replica]
        assert all(other.at >= fault.at + fault.kind.seconds for other in later)


def test_a_fault_comes_in_each_interval_as_long_as_some_replica_is_free() -> None:
    assert [int(fault.at // 6.0) for fault in schedule([KINDS["kill"]], 2, 60.0, 6.0, seed=3)] == list(range(10))
    assert len(schedule([KINDS["stop-30"]], 1, 60.0, 6.0, seed=3)) == 2


def test_the_share_of_replicas_that_ran() -> None:
    assert share_there([], 4, 100.0) == 1.0
    assert share_there([Fault(50.0, KINDS["kill"], 1)], 4, 100.0) == 1.0
    assert share_there([Fault(50.0, KINDS["stop-10"], 1)], 4, 100.0) == pytest.approx(1 - 10 / 400)
    assert share_there([Fault(95.0, KINDS["cut"], 1)], 4, 100.0) == pytest.approx(1 - 5 / 400)
    assert share_there([Fault(50.0, KINDS["slow"], 1)], 4, 100.0) == pytest.approx(1 - 7.5 / 400)


def step(time: float, replica: int, epoch: int, **fields: object) -> dict[str, object]:
    about = {"tip": str(epoch), "own": 10.0, "loss": 1.0, "digest": "same", "life": 0}
    return {"event": "step", "time": time, "replica": f"r{replica}", "epoch": epoch} | about | fields


def test_what_was_kept() -> None:
    lines = [
        *(step(9.9, replica, 1) for replica in range(2)),  # before the time that counts
        *(step(12.0, replica, 2) for replica in range(2)),
        step(13.0, 0, 3),
        step(15.0, 1, 3, own=0.0),  # it was left out
        {"event": "lost", "time": 15.0, "replica": "r1", "life": 0, "samples": 10.0, "reason": "left out"},
        step(18.0, 0, 4, loss=0.5),
        step(18.1, 1, 4, life=1),
        {"event": "lost", "time": 21.0, "replica": "r1", "life": 1, "samples": 10.0, "reason": "late"},
    ]
    found = measure(lines, [Life(1, 0, 5.0), Life(1, 1, 14.5)], began=10.0, seconds=10.0, per_second=10.0)
    assert (found.of_ideal, found.steps, found.unlike, found.forked) == (0.5, 3, 0, 0)
    assert found.lost == {"killed": 0.0, "left out": 0.1, "late": 0.0, "epoch repeated": 0.0}
    assert (found.longest, found.median) == (5.0, 2.0)
    assert found.newcomers == pytest.approx([3.6])
    assert found.started == 1
    assert found.curve == [(20.0, 1.0), (40.0, 1.0), (50.0, 1.0), (70.0, 0.75)]


def test_of_a_step_that_ends_after_the_run_the_share_of_its_time_counts() -> None:
    lines = [step(at, 0, epoch) for epoch, at in enumerate((10.0, 14.0, 22.0, 30.0))]
    found = measure(lines, [], began=10.0, seconds=6.0, per_second=1.0)
    assert found.of_ideal == pytest.approx((10.0 + 2.0 / 8.0 * 10.0) / 6.0)
    assert (found.steps, found.longest) == (1, 8.0)


def test_unlike_parameters_and_steps_on_two_sides() -> None:
    lines = [
        step(1.0, 0, 1),
        step(1.0, 1, 1, digest="other"),
        *(step(2.0, replica, 2) for replica in range(2)),
        step(1.9, 2, 2, tip="alone", digest="alone"),
    ]
    found = measure(lines, [], began=0.0, seconds=10.0, per_second=10.0)
    assert (found.steps, found.unlike, found.forked) == (2, 1, 1)
    assert (found.of_ideal, found.lost["left out"]) == (0.4, 0.1)
    assert found.longest == 8.0, "from the last step to the end"


def test_a_loss_is_compared_after_as_many_samples() -> None:
    assert loss_beside([(100.0, 4.0), (200.0, 2.0)], [(100.0, 4.0), (200.0, 1.0), (300.0, 0.1)]) == 2.0
    assert loss_beside([], [(100.0, 4.0)]) is None
