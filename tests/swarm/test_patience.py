"""How long a round without a target of samples waits: who joined first says, may change its mind, and may leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.swarm.protocol.gathering import Until
from shoal.swarm.protocol.messages import Begin, Call, Progress
from tests.swarm.rounds import RULES, TIP, begun, key, keys
from tests.swarm.test_coordinator import gathering, join, running

ROUND_SECONDS = RULES.round_timeout


def test_who_joined_first_says_how_long_all_wait() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, now=0.0, patience=8.0)
    join(coordinator, 2, now=1.0, patience=2.0)
    assert coordinator.wake_at() == 8.0
    join(coordinator, 2, now=1.5, patience=30.0)
    assert coordinator.wake_at() == 8.0


@pytest.mark.parametrize("patience", [1.0, 40.0])
def test_and_it_may_change_its_mind(patience: float) -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, now=0.0, patience=8.0)
    join(coordinator, 2, now=1.0, patience=50.0)
    join(coordinator, 1, now=2.0, patience=patience)
    assert coordinator.wake_at() == 2.0 + patience


@pytest.mark.parametrize("others", [1, 2])
def test_one_that_would_wait_for_a_day_does_not_have_all_wait(others: int) -> None:
    coordinator = gathering(1, 2, 3, 4)
    join(coordinator, 4, now=0.0, patience=86400.0)
    for number in range(1, 1 + others):
        join(coordinator, number, now=1.0, patience=5.0)
    assert coordinator.wake_at() == RULES.matchmaking_time
    join(coordinator, 4, now=9.0, patience=86400.0)
    assert coordinator.wake_at() == RULES.matchmaking_time, "it may change its mind, and it is one of several"


def test_who_comes_late_to_one_that_waits_for_a_day_has_its_time() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 3, now=0.0, patience=86400.0)
    join(coordinator, 1, now=3600.0, patience=5.0)
    assert coordinator.wake_at() == 3605.0


def test_when_it_leaves_the_next_one_says() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, now=0.0, patience=8.0)
    join(coordinator, 2, now=1.0, patience=50.0)
    assert coordinator.unjoin(key(1), 2.0) == []
    assert coordinator.wake_at() == 51.0
    assert list(coordinator.joins) == list(coordinator.gathered) == [key(2)]


def test_when_all_leave_it_is_as_if_nobody_had_come() -> None:
    coordinator = gathering(1, 2, 3)
    for number in (1, 2):
        join(coordinator, number, now=0.0, patience=1.0)
    for number in (1, 2):
        coordinator.unjoin(key(number), 0.5)
    assert coordinator.phase is Until.CALL
    assert coordinator.wake_at() is None
    assert coordinator.tick(60.0) == [], "a round began without anybody"
    join(coordinator, 3, now=60.0, patience=4.0)
    assert coordinator.wake_at() == 64.0


def test_who_has_left_is_not_in_the_round() -> None:
    coordinator = gathering(1, 2, 3)
    for number in (1, 2):
        join(coordinator, number, now=0.0)
    coordinator.unjoin(key(2), 0.5)
    (sent,) = join(coordinator, 3, now=1.0) + join(coordinator, 2, now=1.0, patience=1.0)
    assert isinstance(sent.message, Begin)
    leads = begun(coordinator, 1.0)
    assert leads.unjoin(key(2), 1.5) == [], "too late: it is in the round, and is put out by what it does"
    assert key(2) in leads.live()


def test_where_samples_are_counted_the_call_says_how_long() -> None:
    coordinator = gathering(1, 2, 3, rules=replace(RULES, target_samples=10.0), veterans=frozenset(keys(1, 2, 3)))
    join(coordinator, 1, now=0.0, patience=8.0)
    join(coordinator, 2, now=0.0, patience=8.0)  # most have joined
    deadline = coordinator.deadline
    join(coordinator, 1, now=2.0, patience=40.0)
    assert coordinator.deadline == deadline
    coordinator.unjoin(key(2), 3.0)
    coordinator.unjoin(key(1), 3.0)
    assert (coordinator.phase, coordinator.deadline) == (Until.BEGIN, deadline)


def test_time_stands_still_while_a_user_lets_the_others_wait() -> None:
    coordinator = running(1, 2)
    for second in range(10, 1000, 10):
        coordinator.wait(float(second))
    assert coordinator.wake_at() == 990.0 + ROUND_SECONDS
    counted = running(1, 2, rules=replace(RULES, target_samples=10.0))
    deadline = counted.wake_at()
    counted.wait(50.0)
    assert counted.wake_at() == deadline, "where samples are counted nobody has a say"


def test_where_samples_are_counted_one_join_calls_nothing() -> None:
    coordinator = gathering(1, 2, 3, rules=replace(RULES, target_samples=10.0))
    join(coordinator, 1, now=0.0, patience=8.0)
    coordinator.tick(8.0)
    assert coordinator.wake_at() is None, "it may lie"
    coordinator.progress(key(2), Progress(TIP, 5.0, 1.0), 9.0)
    assert coordinator.phase is Until.BEGIN, "an earlier coordinator may have called it, and nobody else"


def test_one_join_calls_the_round_when_it_has_waited_and_the_others_have_half_of_the_target() -> None:
    coordinator = gathering(1, 2, 3, rules=replace(RULES, target_samples=10.0))
    coordinator.progress(key(2), Progress(TIP, 5.0, 1.0), 0.0)
    join(coordinator, 1, now=0.0, patience=8.0)
    assert coordinator.phase is Until.CALL
    assert coordinator.wake_at() == 8.0


def test_where_samples_are_counted_those_who_joined_bring_theirs() -> None:
    coordinator = gathering(1, 2, 3, rules=replace(RULES, target_samples=10.0))
    join(coordinator, 1, now=0.0, patience=8.0)
    coordinator.progress(key(2), Progress(TIP, 8.9, 1.0), 1.0)
    assert coordinator.phase is Until.CALL
    _, actions = coordinator.progress(key(2), Progress(TIP, 9.0, 1.0), 1.0)
    assert any(isinstance(action.message, Call) for action in actions)
