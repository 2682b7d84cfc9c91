"""The states of an epoch: which transition is made when, for ranks that end epochs in the background; and what ranks of
a cluster do together. The run is a board in memory, see `in_memory`."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.health.record import FaultKind
from shoal.membership.pin import Pin
from shoal.optim.epoch import EpochState
from shoal.swarm.protocol.errors import AveragingError, Behind, Unusable
from tests.cluster.threads import gang_of
from tests.optim.ending import is_done
from tests.optim.in_memory import HANGS_AFTER, Rank, World, in_threads

ACCUMULATING, AVERAGING = EpochState.ACCUMULATING, EpochState.AVERAGING
STEPPING, FAILED, CLOSED = EpochState.STEPPING, EpochState.FAILED, EpochState.CLOSED
SHARE = 64.0


class Gate:
    """Holds a call until it is opened; then the call does what it did before, or raises an error."""

    def __init__(self, held: Callable[..., Any] = lambda: None) -> None:
        self.held, self.opened = held, threading.Event()
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.opened.wait(10)
        if self.error is not None:
            raise self.error
        return self.held(*args, **kwargs)

    delay = __call__


def average_of(rank: Rank) -> Gate:
    """Hold the round of the run."""
    gate = Gate(rank.run.average)
    rank.run.average = gate  # type: ignore[method-assign]
    return gate


def step_of(rank: Rank) -> Gate:
    """Hold the step of the wrapped optimizer."""
    optimizer: Any = rank.made.stepped.optimizer
    optimizer.pace = Gate()
    return optimizer.pace  # type: ignore[no-any-return]


@pytest.fixture
def alone() -> Iterator[Callable[..., Rank]]:
    """Makes the one peer of a run."""
    with contextlib.ExitStack() as stack:

        def make(**given: Any) -> Rank:
            world = World(1, None)
            stack.callback(world.close)
            rank = Rank(world, 0, **{"share": SHARE, **given})
            stack.callback(rank.close)
            rank.begin()
            return rank

        yield make


def ones(parameter: Tensor) -> Tensor:
    return torch.ones_like(parameter)


def wait_until_done(rank: Rank) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while not is_done(rank.epoch):
        assert time.monotonic() < deadline
        time.sleep(0.001)


Alone = Callable[..., Rank]


def test_average_and_step_in_the_background(alone: Alone) -> None:
    rank = alone(delay_grad_averaging=True)
    epoch, start = rank.epoch, rank.values
    average, step = average_of(rank), step_of(rank)
    rank.step(ones, SHARE)
    assert epoch.state is AVERAGING
    rank.step(ones, 8.0)
    assert epoch.state is AVERAGING
    average.opened.set()
    deadline = time.monotonic() + HANGS_AFTER
    while epoch.state is not STEPPING:
        assert time.monotonic() < deadline
        rank.step(ones, 0.0)
    assert epoch.applied.epoch == 0
    assert [tip.epoch for tip in rank.tracker.began] == [1], "the next epoch has a name before the step is made"
    assert rank.values == start
    step.opened.set()
    wait_until_done(rank)
    rank.step(ones, 0.0)
    assert epoch.state is ACCUMULATING
    assert epoch.applied.epoch == 1
    assert rank.values != start
    assert rank.rounds.work.samples == 8.0


def test_only_the_step_in_the_background(alone: Alone) -> None:
    rank = alone(delay_optimizer_step=True)
    step = step_of(rank)
    rank.step(ones, SHARE)
    assert rank.epoch.state is STEPPING
    step.opened.set()
    wait_until_done(rank)
    rank.step(ones, 0.0)
    assert rank.epoch.state is ACCUMULATING
    assert rank.epoch.applied.epoch == 1


def test_nothing_in_the_background(alone: Alone) -> None:
    rank = alone()
    rank.step(ones, SHARE)
    assert rank.epoch.state is ACCUMULATING
    assert rank.epoch.applied.epoch == 1


def test_at_most_one_epoch_late(alone: Alone) -> None:
    """Who has its part of the next epoch, too, waits for the round of the last."""
    rank = alone(delay_grad_averaging=True)
    average = average_of(rank)
    rank.step(ones, SHARE)
    timer = threading.Timer(0.05, average.opened.set)
    timer.start()
    rank.step(ones, SHARE)
    assert average.opened.is_set()
    assert rank.epoch.applied.epoch == 1
    assert rank.epoch.state in (AVERAGING, STEPPING)
    timer.join()


def failed(rank: Rank) -> Rank:
    """Its first round in the background has failed."""
    rank.run.outcomes = [ArithmeticError("no average")]
    rank.step(ones, SHARE)
    wait_until_done(rank)
    with pytest.raises(ArithmeticError, match="no average"):
        rank.step(ones, 0.0)
    assert rank.epoch.state is FAILED
    return rank


def test_a_failure_is_tried_again_with_what_was_brought(alone: Alone) -> None:
    rank = failed(alone(delay_grad_averaging=True))
    average = average_of(rank)
    rank.step(ones, 8.0)
    assert rank.epoch.state is AVERAGING
    average.opened.set()
    wait_until_done(rank)
    rank.step(ones, 0.0)
    assert rank.epoch.state is ACCUMULATING
    assert rank.epoch.applied.epoch == 1
    assert [each.weight for each in rank.run.contributions] == [SHARE, SHARE]
    assert rank.rounds.work.samples == 8.0


def test_a_step_that_fails_is_a_failure_too(alone: Alone) -> None:
    rank = alone(delay_optimizer_step=True)
    step = step_of(rank)
    step.error = ArithmeticError("a bad step")
    step.opened.set()
    rank.step(ones, SHARE)
    wait_until_done(rank)
    with pytest.raises(ArithmeticError, match="a bad step"):
        rank.step(ones, 0.0)
    assert rank.epoch.state is FAILED
    step.error = None
    rank.end()


def test_no_round_and_nothing_to_go_on_with_alone_is_a_failure(alone: Alone) -> None:
    rank = alone(delay_grad_averaging=True)
    rank.run.outcomes, rank.run.is_over = [AveragingError("the run was left")], True
    rank.step(ones, SHARE)
    wait_until_done(rank)
    rank.epoch.take_result(wait=False)
    assert rank.epoch.state is FAILED


def test_another_state_ends_a_failure(alone: Alone) -> None:
    rank = failed(alone(delay_grad_averaging=True))
    rank.epoch.continue_from(lambda: None)
    assert rank.epoch.state is ACCUMULATING
    assert rank.rounds.work.samples == 0
    assert rank.tracker.restarts == 1


def test_others_that_are_past_the_epoch_are_no_failure(alone: Alone) -> None:
    """It asks where they are, and goes on with its own state, since nobody sends another."""
    rank = alone(delay_grad_averaging=True)
    rank.run.outcomes = [Behind("the swarm is at epoch 5")]
    rank.step(ones, SHARE)
    wait_until_done(rank)
    rank.epoch.take_result(wait=False)
    assert rank.epoch.state is ACCUMULATING
    assert ("ask", []) in rank.run.done


def test_others_that_are_past_the_epoch_in_the_foreground(alone: Alone) -> None:
    rank = alone()
    rank.run.outcomes = [Behind("the swarm is at epoch 5")]
    rank.step(ones, SHARE)
    assert (rank.epoch.applied.epoch, rank.rounds.work.samples) == (0, SHARE)
    assert ("ask", []) in rank.run.done
    rank.step(ones, 0.0)
    assert rank.epoch.applied.epoch == 1, "the next step tries again"


def test_a_state_that_the_background_may_bring_is_not_downloaded(alone: Alone) -> None:
    rank = alone(delay_grad_averaging=True)
    average = average_of(rank)
    rank.step(ones, SHARE)
    rank.run.swarm.behind = rank.state.tip.after(bytes(32), 1e6)
    assert not rank.epoch.is_behind
    average.error = Behind("as after a shutdown")
    average.opened.set()
    wait_until_done(rank)
    rank.epoch.take_result(wait=False)
    rank.run.swarm.behind = rank.state.tip.after(bytes(32), 1e6)
    assert rank.epoch.is_behind


def test_who_rests_uses_no_batch(alone: Alone) -> None:
    rank = alone()
    rank.run.swarm.rests_for = 5.0
    rank.step(ones, SHARE)
    assert (rank.epoch.applied.epoch, rank.rounds.work.samples, rank.tracker.reports[1:]) == (0, 0.0, [])


def test_too_few_peers_bring_nothing(alone: Alone) -> None:
    rank = alone(min_peers=2)
    rank.step(ones, SHARE)
    assert (rank.epoch.applied.epoch, rank.rounds.work.samples, rank.run.contributions) == (0, SHARE, [])
    rank.run.here = 2
    rank.step(ones, 0.0)
    assert rank.epoch.applied.epoch == 1


def test_each_fragment_has_its_turn(alone: Alone) -> None:
    rank = alone(outer=shoal.DiLoCo(fragments=2))
    start = rank.values
    rank.run.outcomes = [Unusable("nobody answers")] * 2
    for epoch in range(2):
        rank.step(ones, SHARE)
        assert rank.epoch.applied.epoch == epoch + 1
    anchors = [[float(each) for each in own.detach().flatten()] for own in rank.state.stepped]
    assert all(now != before for now, before in zip(anchors, start, strict=True))


@pytest.mark.parametrize("overlap", ["free", 1])
@pytest.mark.parametrize("error", [AveragingError("no average"), Behind("the run has gone on")])
def test_samples_of_a_failed_round_count_in_the_next(alone: Alone, overlap: Any, error: Exception) -> None:
    outer = shoal.DiLoCo(inner_steps=4, overlap=overlap, mix="keep")
    rank = alone(outer=outer, target_batch_size=None, share=4.0)
    rank.run.outcomes, rank.run.is_over = [error], True
    number = 0
    while rank.epoch.applied.epoch < 3 and number < 40:
        rank.step(ones, 16.0)
        rank.epoch.wait()
        number += 1
    rank.end()
    assert rank.epoch.applied.epoch >= 3
    failed, *brought = [each.weight for each in rank.run.contributions]
    assert failed
    assert sum(brought) + rank.rounds.work.samples == number * 16.0


def test_after_a_shutdown(alone: Alone) -> None:
    rank = alone(delay_optimizer_step=True)
    step = step_of(rank)
    step.opened.set()
    rank.step(ones, SHARE)
    rank.close()
    assert rank.epoch.state is CLOSED
    assert rank.epoch.applied.epoch == 1, "the step that was under way is applied"


# -- all ranks of two clusters


@contextlib.contextmanager
def two_clusters(**given: Any) -> Iterator[list[Rank]]:
    """Each of two ranks."""
    with contextlib.ExitStack() as stack:
        world = World(2, None)
        stack.callback(world.close)
        gangs = [stack.enter_context(gang_of(2)) for _ in range(2)]
        ranks = [Rank(world, peer, team, share=SHARE, **given) for peer, gang in enumerate(gangs) for team in gang]
        yield ranks
        for rank in ranks:
            rank.close()


def train(rank: Rank, gradient: float, samples: float) -> None:
    rank.begin()
    rank.step(lambda parameter: torch.full_like(parameter, gradient), samples)


def at_all(ranks: list[Rank], gradients: list[float]) -> None:
    in_threads(*[functools.partial(train, *each, SHARE) for each in zip(ranks, gradients, strict=True)])


def test_what_is_not_finite_at_one_rank_is_brought_by_none(caplog: pytest.LogCaptureFixture) -> None:
    with two_clusters() as ranks:
        start = ranks[0].values
        at_all(ranks, [1.0, 1.0, 7.0, math.inf])
        assert ranks[0].values == ranks[2].values == [[value - 0.125 for value in each] for each in start]
        assert ranks[1].values == ranks[3].values
        assert [each.run.contributions[0].weight for each in (ranks[0], ranks[2])] == [SHARE, 0.0]
        assert ranks[2].run.faults.so_far()[0] == {FaultKind.NOT_FINITE: 1}
        assert caplog.text.count("this peer's gradients are not finite") == 1


def test_a_pin_is_followed_by_all_ranks() -> None:
    with two_clusters() as ranks:
        at_all(ranks, [1.0] * 4)
        cluster, tip = ranks[:2], ranks[0].state.tip
        pin = Pin("in memory", 3, tip.epoch, tip.samples, tip.lineage, False)
        cluster[0].run.swarm.gate = SimpleNamespace(pin=pin)
        in_threads(*[functools.partial(rank.step, ones, 1.0) for rank in cluster])
        assert [rank.state.tip.pin for rank in cluster] == [rank.epoch.applied.pin for rank in cluster] == [3, 3]
        assert cluster[0].run.swarm.tip.pin == 3
        assert [rank.rounds.work.samples for rank in cluster] == [1.0, 1.0]
        cluster[0].run.swarm.rests_for = 5.0
        in_threads(*[functools.partial(rank.step, ones, 1.0) for rank in cluster])
        assert [rank.rounds.work.samples for rank in cluster] == [1.0, 1.0], "they all wait"


def test_the_norm_is_that_of_all_strands() -> None:
    with two_clusters(max_grad_norm=1.0) as ranks:
        start = [rank.values for rank in ranks]
        at_all(ranks, [1.0, 2.0, 3.0, 6.0])
        norm = math.sqrt(7 * 2.0**2 + 7 * 4.0**2)
        assert ranks[0].events[-1].grad_norm == pytest.approx(norm)
        for rank, before, mean in zip(ranks, start, [2.0, 4.0, 2.0, 4.0], strict=True):
            assert rank.values[0][0] == pytest.approx(before[0][0] - 0.125 * mean / norm, rel=1e-5)
        assert ranks[0].outcome == ranks[2].outcome
        assert ranks[1].outcome == ranks[3].outcome
        assert len({rank.epoch.digest for rank in ranks}) == 1, "one hash of all parts, at all ranks"
