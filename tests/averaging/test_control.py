"""The handle of a step: triggers, weights, times and cancelling, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.control import AveragingStage, Gathered, StepControl
from shoal.dht.records import get_dht_time
from tests.averaging.test_averager import averagers
from tests.waiting import wait_until

pytestmark = pytest.mark.processes


def filled(*values: float) -> list[list[torch.Tensor]]:
    return [[torch.full((20_000,), value)] for value in values]


def assert_all(tensors: list[list[torch.Tensor]], value: float) -> None:
    assert all(torch.equal(mine, tensors[0][0]) for (mine,) in tensors)
    assert torch.allclose(tensors[0][0], torch.tensor(value))


@pytest.mark.long
def test_the_stages_of_a_round_that_waits_for_two_triggers() -> None:
    tensors = filled(0.0, 1.0, 2.0, 3.0)
    # Silence of so long is a fault elsewhere; waiting for a user is none.
    with averagers(tensors, min_matchmaking_time=10.0, next_chunk_timeout=1.5, allreduce_timeout=4.0) as peers:
        controls = [peer.step(wait=False, require_trigger=i in (1, 2)) for i, peer in enumerate(peers)]
        want = [
            AveragingStage.RUNNING_ALLREDUCE,
            AveragingStage.AWAITING_TRIGGER,
            AveragingStage.AWAITING_TRIGGER,
            AveragingStage.RUNNING_ALLREDUCE,
        ]
        wait_until(lambda: [control.stage for control in controls] == want)
        assert [control.triggered for control in controls] == [True, False, False, True]
        assert [control.began_allreduce for control in controls] == [True, False, False, True]
        controls[1].allow_allreduce()
        time.sleep(6.0)  # longer than every timeout: nobody is put out, and the round does not end
        assert not any(control.done() for control in controls)
        with peers[2].get_tensors() as (tensor,):  # until the trigger the tensors are the user's
            tensor.fill_(10.0)
        controls[2].allow_allreduce()
        assert all(len(control.result(60.0)) == 4 for control in controls)
        assert all(control.stage is AveragingStage.FINISHED for control in controls)
        assert_all(tensors, 14 / 4)
        for control in controls:
            control.allow_allreduce()  # once more harms nobody


def test_the_weight_may_be_set_until_the_trigger() -> None:
    tensors = filled(1.0, 5.0, 9.0)
    with averagers(tensors, min_matchmaking_time=10.0) as peers:
        controls = [peer.step(weight=3.0, wait=False, require_trigger=True) for peer in peers]
        wait_until(lambda: all(control.stage is AveragingStage.AWAITING_TRIGGER for control in controls))
        for control, weight in zip(controls, (1.0, 2.0, 0.0), strict=True):
            control.weight = weight
            assert control.weight == weight
            with pytest.raises(ValueError, match="weight"):
                control.weight = float("nan")
            control.allow_allreduce()
        for control in controls:
            control.result(60.0)
        controls[0].weight = 100.0
        assert controls[0].weight == 1.0
        assert_all(tensors, 11 / 3)


@pytest.mark.long
@pytest.mark.parametrize("client", [False, True])
def test_who_cancels_before_the_round_is_not_in_it(client: bool) -> None:
    tensors = filled(0.0, 1.0, 2.0, 3.0)
    modes = [client and i % 2 == 0 for i in range(4)]
    with averagers(tensors, min_matchmaking_time=20.0, client_mode=modes) as peers:
        controls = [peer.step(wait=False) for peer in peers[:2]]
        wait_until(lambda: all(control.stage is AveragingStage.LOOKING_FOR_GROUP for control in controls))
        assert all(control.cancel() for control in controls)
        assert all(control.cancelled() for control in controls)
        now = shoal.get_dht_time()
        controls = [peer.step(wait=False, scheduled_time=now + 1.0) for peer in peers[2:]]
        assert all(len(control.result(60.0)) == 2 for control in controls)
        assert_all(tensors[2:], 2.5)
        assert torch.equal(tensors[0][0], torch.zeros(20_000))
        assert torch.equal(tensors[1][0], torch.ones(20_000))


def test_who_cancels_in_the_round_leaves_the_rest_able_to_finish() -> None:
    tensors = filled(0.0, 1.0, 2.0, 3.0)
    with averagers(tensors, min_matchmaking_time=20.0) as peers:
        controls = [peer.step(wait=False, require_trigger=i == 0) for i, peer in enumerate(peers)]
        wait_until(lambda: controls[0].stage is AveragingStage.AWAITING_TRIGGER)
        assert controls[0].cancel()
        for control in controls[1:]:
            control.result(60.0)
        assert_all(tensors[1:], 2.0)
        assert torch.equal(tensors[0][0], torch.zeros(20_000))
        assert controls[0].stage is AveragingStage.FINISHED
        assert not controls[1].cancel(), "what is done can't be cancelled"
        # It is free for the next round, and so are its tensors.
        for control in [peer.step(wait=False) for peer in peers]:
            assert len(control.result(60.0)) == 4
        assert_all(tensors, 1.5)


@pytest.mark.long
def test_who_cancels_brings_nothing_however_late_the_reactor_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = filled(5.0, 1.0, 2.0)
    with averagers(tensors, min_matchmaking_time=20.0) as peers:
        controls = [peer.step(wait=False, require_trigger=i == 0) for i, peer in enumerate(peers)]
        wait_until(lambda: controls[0].stage is AveragingStage.AWAITING_TRIGGER)
        allow = StepControl.allow_allreduce

        def allow_and_stand_still(control: StepControl) -> None:
            allow(control)
            time.sleep(0.5)  # `cancel` has ended the waiting for the trigger: a busy machine may stop it here

        monkeypatch.setattr(StepControl, "allow_allreduce", allow_and_stand_still)
        assert controls[0].cancel()
        for control in controls[1:]:
            control.result(60.0)
        assert_all(tensors[1:], 1.5)


def test_a_step_that_is_cancelled_and_shut_down_at_once_leaves_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    with averagers(filled(0.0, 1.0), min_matchmaking_time=20.0) as peers:
        control = peers[0].step(wait=False)
        wait_until(lambda: control.stage is AveragingStage.LOOKING_FOR_GROUP)
        engine = peers[0]._engine
        swarm, engine.swarm = engine.swarm, None  # as `shutdown` begins
        assert control.cancel()
        wait_until(lambda: not engine._tasks)
        engine.swarm = swarm
        peers[0].dht.reactor.submit(asyncio.sleep(0)).result(60.0)  # the loop lets go of the task
        gc.collect()
    assert not caplog.records


@pytest.mark.long
def test_a_peer_that_never_triggers_costs_the_others_no_more_than_its_own_deadline() -> None:
    tensors = filled(0.0, 1.0, 2.0)
    with averagers(tensors, min_matchmaking_time=20.0) as peers:
        controls = [peer.step(wait=False, require_trigger=i == 0, timeout=60.0) for i, peer in enumerate(peers)]
        wait_until(lambda: controls[0].stage is AveragingStage.AWAITING_TRIGGER)
        controls[0].cancel()
        late = peers[0].step(wait=False, require_trigger=True, timeout=2.0, scheduled_time=shoal.get_dht_time())
        for control in controls[1:]:
            control.result(60.0)
        with pytest.raises(shoal.AveragingError, match="no result within"):
            late.result(60.0)
        assert_all(tensors[1:], 1.5)


@pytest.mark.long
def test_the_time_may_be_moved() -> None:
    tensors = filled(0.0, 1.0, 5.0)
    with averagers(tensors) as peers:
        later = shoal.get_dht_time() + 80.0
        controls = [peer.step(wait=False, scheduled_time=later, timeout=100.0) for peer in peers[:2]]
        time.sleep(1.0)
        assert not any(control.done() for control in controls), "the third may still come"
        for control in controls:
            control.scheduled_time = shoal.get_dht_time() + 0.2
        assert all(len(control.result(60.0)) == 2 for control in controls)
        assert abs(controls[0].scheduled_time - shoal.get_dht_time()) < 61.0
        assert_all(tensors[:2], 0.5)


def test_a_control_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    now = shoal.get_dht_time()
    control = StepControl(now + 1.0, now + 5.0, True, 2.0, b"data")
    assert control.stage is AveragingStage.IDLE
    assert (control.weight, control.allow_retries, control.data_for_gather) == (2.0, True, b"data")
    assert 4.0 < control.get_timeout() <= 5.0
    control.scheduled_time = now + 9.0
    assert "after the deadline" in caplog.text
    assert StepControl(now, now - 1.0).get_timeout() == 0.0
    bad: Any
    for bad in (-1.0, float("inf"), True, "1", 1e16):
        with pytest.raises(ValueError, match="weight"):
            StepControl(now, now, True, bad)


def test_pairs_are_made_of_those_who_did_not_cancel() -> None:
    """Whether a step is cancelled before its JOIN, after it, or in the round: nobody is left over."""
    with averagers(
        [[torch.full((3,), float(i))] for i in range(4)], target_group_size=2, client_mode=[True, False] * 2
    ) as peers:
        for _ in range(10):
            controls = [peer.step(wait=False, require_trigger=True, timeout=60.0) for peer in peers]
            for control in controls[:2]:
                control.cancel()
            for control in controls[2:]:
                control.allow_allreduce()
            results = [control.result(60.0) for control in controls[2:]]
            assert all(set(result) == {peer.peer_id for peer in peers[2:]} for result in results)


def test_what_waits_for_a_cancel_ends_with_it_and_with_the_step() -> None:
    async def scenario() -> None:
        cancelled, finished = (StepControl(get_dht_time(), get_dht_time() + 9) for _ in range(2))
        waiting = asyncio.gather(cancelled.wait_for_cancel(), finished.wait_for_cancel())
        await asyncio.sleep(0)
        assert cancelled.cancel()
        work: Future[Gathered] = Future()
        finished.attach(work, lambda: None)
        work.set_result({})
        await asyncio.wait_for(waiting, 60)
        await cancelled.wait_for_cancel()

    asyncio.run(scenario())
