"""`TrainingStateAverager`: steps and rounds, at once and in the background, and the state that newcomers get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.swarm_of_averagers import started
from tests.waiting import wait_until

ADAM = partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.9))
DECAY = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / max(1, t))


def linear(count: int) -> list[nn.Linear]:
    torch.manual_seed(1337)
    return [nn.Linear(2, 3) for _ in range(count)]


def makers(trained: list[nn.Linear], **options: Any) -> list[Callable[..., TrainingStateAverager]]:
    own = [{k: v[i] if isinstance(v, list) else v for k, v in options.items()} for i in range(len(trained))]
    return [
        partial(TrainingStateAverager, **{"params": model.parameters(), "optimizer": ADAM, **mine})
        for model, mine in zip(trained, own, strict=True)
    ]


def backward(model: nn.Linear, target: float, scale: float = 1.0) -> None:
    F.mse_loss(model(torch.ones(2)), torch.full((3,), target)).mul(scale).backward()


def alike(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("offload", "reuse", "sync"),
    [(False, False, False), (True, True, False), (True, False, False), (False, True, True), (True, False, True)],
)
def test_steps_and_rounds_of_every_kind(offload: bool, reuse: bool, sync: bool) -> None:
    one, other = linear(2)
    extras = [[torch.randn(2, 2), -torch.rand(1)], [-torch.randn(2, 2), torch.rand(1)]]
    made = makers(
        [one, other],
        extra_tensors=[tuple(mine) for mine in extras],
        scheduler=DECAY,
        sync_epoch_when_averaging=sync,
        average_opt_statistics=("exp_avg_sq",),
        offload_optimizer=offload,
        reuse_tensors=reuse,
    )
    with started(made, target_group_size=2, min_matchmaking_time=20.0) as (first, second):
        for step in range(20):
            backward(one, 1.0, 2.0)
            first.step(optimizer_step=True, zero_grad=True, averaging_round=step == 10, delay_averaging=True)
            backward(other, -1.0)
            second.step(optimizer_step=True, zero_grad=True, averaging_round=step == 10, delay_averaging=False)
        assert all(p.grad is None for model in (one, other) for p in model.parameters())
        assert one(torch.ones(2)).mean() > 0.4
        assert other(torch.ones(2)).mean() < -0.4
        assert all(torch.equal(a, b) for a, b in zip(*extras, strict=True)), "extra tensors were not averaged"

        def statistic(averager: TrainingStateAverager) -> torch.Tensor:
            return averager.optimizer.state_dict()["state"][0]["exp_avg_sq"]

        before = [statistic(averager).clone() for averager in (first, second)]
        assert not torch.allclose(*before)
        first.step(increment_epoch=True)
        first.step(increment_epoch=True, averaging_round=True, delay_averaging=True)
        second.step(increment_epoch=True, averaging_round=True, delay_averaging=True)
        for averager in (first, second):
            gathered = averager.step(wait_for_delayed_updates=True)
            assert gathered == {first.peer_id: 2, second.peer_id: 1}
            assert torch.allclose(statistic(averager), (before[0] + before[1]) / 2)
        assert alike(one, other)
        assert (first.local_epoch, second.local_epoch) == (2, 2 if sync else 1)
        assert first.scheduler is not None
        assert second.scheduler is not None
        assert (first.scheduler.last_epoch, second.scheduler.last_epoch) == (2, 2 if sync else 1)


def test_what_changes_while_a_round_runs_is_kept_by_the_delta_rule() -> None:
    one, other = linear(2)
    starts = [[p.detach().clone() for p in model.parameters()] for model in (one, other)]
    sgd = partial(torch.optim.SGD, lr=1.0)
    made = makers([one, other], optimizer=sgd, delta_rule_averaging=True)
    with started(made, target_group_size=2, min_matchmaking_time=20.0) as (first, second):
        first.step(averaging_round=True, delay_averaging=True)  # the other has not come yet
        for p in one.parameters():
            p.grad = torch.full_like(p, 0.25)
        first.step(optimizer_step=True, zero_grad=True)  # and does not hold this up
        assert first.averaging_in_progress
        second.step(averaging_round=True)
        first.step(wait_for_delayed_updates=True)
        assert not first.averaging_in_progress
    for mine, theirs, a, b in zip(one.parameters(), other.parameters(), *starts, strict=True):
        assert torch.allclose(theirs, (a + b) / 2)
        assert torch.allclose(mine, (a + b) / 2 - 0.25)


def test_a_delayed_step_is_seen_in_a_later_call_and_its_error_too() -> None:
    (model,) = linear(1)
    go = threading.Event()
    sgd = partial(torch.optim.SGD, lr=1.0)
    (made,) = makers([model], optimizer=sgd, offload_optimizer=True, scheduler=DECAY)
    with started([made]) as (averager,):
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True, wait_for_trigger=go.wait)
        for p in model.parameters():
            p.grad = torch.full_like(p, 100.0)  # the step is made with the gradients of its call
        averager.step(wait_for_delayed_updates=False)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        go.set()
        averager.step(wait_for_delayed_updates=True)
        assert all(torch.equal(a, b - 1) for a, b in zip(model.parameters(), before, strict=True))

        def fails() -> None:
            raise RuntimeError("no gradients came")

        averager.step(optimizer_step=True, delay_optimizer_step=True, wait_for_trigger=fails)
        with pytest.raises(RuntimeError, match="no gradients came"):
            averager.step(wait_for_delayed_updates=True)
        assert all(torch.equal(a, b - 1) for a, b in zip(model.parameters(), before, strict=True))
        assert averager.step() is None


def test_a_delayed_step_and_its_round() -> None:
    trained = linear(3)
    sgd = partial(torch.optim.SGD, lr=1.0)
    starts = [[p.detach().clone() for p in model.parameters()] for model in trained]
    with started(makers(trained, optimizer=sgd, offload_optimizer=True), min_matchmaking_time=20.0) as averagers:
        for number, (model, averager) in enumerate(zip(trained, averagers, strict=True)):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(number))
            averager.step(optimizer_step=True, delay_optimizer_step=True, averaging_round=True)
        for averager in averagers:
            gathered = averager.step(wait_for_delayed_updates=True)
            assert gathered is not None
            assert len(gathered) == 3
    assert alike(trained[0], trained[1])
    assert alike(trained[0], trained[2])
    for mine, *theirs in zip(trained[0].parameters(), *starts, strict=True):
        assert torch.allclose(mine, sum(theirs) / 3 - 1.0, atol=1e-6)


def test_scheduled_rounds_and_weights() -> None:
    one, other = linear(2)
    starts = [[p.detach().clone() for p in model.parameters()] for model in (one, other)]
    with started(makers([one, other]), target_group_size=2, min_matchmaking_time=20.0) as averagers:
        controls = [averager.schedule_step() for averager in averagers]
        wait_until(lambda: all(control.stage is shoal.AveragingStage.AWAITING_TRIGGER for control in controls))
        for averager, control, weight in zip(averagers, controls, (3.0, 1.0), strict=True):
            given: dict[str, Any] = {"averaging_control": control, "averaging_opts": {"weight": weight}}
            averager.step(averaging_round=True, delay_averaging=True, **given)
        for averager in averagers:
            averager.step(wait_for_delayed_updates=True)
    assert alike(one, other)
    for mine, a, b in zip(one.parameters(), *starts, strict=True):
        assert torch.allclose(mine, 0.75 * a + 0.25 * b, atol=1e-6)


def test_a_round_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    (model,) = linear(1)
    before = [p.detach().clone() for p in model.parameters()]
    with started(makers([model])) as (averager,):
        now = shoal.get_dht_time()
        opts = {"timeout": 0.5, "scheduled_time": now}
        assert averager.step(averaging_round=True, averaging_opts=opts) is None
        assert "the state was not averaged: no result within" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_making_statistics_changes_no_parameter() -> None:
    (model,) = linear(1)
    before = [p.detach().clone() for p in model.parameters()]
    (made,) = makers([model], optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    with started([made]) as (averager,):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        state = averager.optimizer.state[model.weight]
        assert state["step"].item() == 0
        assert torch.equal(state["exp_avg"], torch.zeros(3, 2))


@pytest.mark.parametrize("offload", [False, True])
def test_a_newcomer_goes_on_from_the_state_of_the_others(offload: bool) -> None:
    one, other = linear(2)
    extras = [[torch.zeros(3)], [torch.full((3,), 5.0)]]
    sharing = [False, True]
    made = makers(
        [one, other], scheduler=DECAY, allow_state_sharing=sharing, extra_tensors=extras, offload_optimizer=offload
    )
    with started(made, target_group_size=2) as (newcomer, donor):
        for _ in range(3):
            backward(other, 1.0)
            donor.step(increment_epoch=True, optimizer_step=True, zero_grad=True)
        donor.local_epoch = 1337
        donor.step()
        assert newcomer.load_state_from_peers(timeout=30.0)
        assert newcomer.local_epoch == 1337
        assert newcomer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 1337)
        assert alike(one, other)
        assert torch.equal(extras[0][0], torch.full((3,), 5.0))
        for model, averager in ((one, newcomer), (other, donor)):
            for _ in range(3):
                backward(model, -1.0)
                averager.step(increment_epoch=True, optimizer_step=True, zero_grad=True)
        assert alike(one, other), "the optimizer's statistics are not the same"
        data, tensors, infos = donor.get_current_state()
        assert data["epoch"] == 1340
        assert len(tensors) == len(infos) == 3


def test_an_older_state_is_not_taken_and_none_is_an_error() -> None:
    one, other = linear(2)
    with started(makers([one, other], allow_state_sharing=[False, True])) as (first, second):
        first.local_epoch = 1
        before = one.weight.detach().clone()
        assert not first.load_state_from_peers(timeout=30.0)
        assert torch.equal(one.weight, before)
        with pytest.raises(shoal.AveragingError, match="nobody shares a state"):
            second.load_state_from_peers(timeout=30.0)
        with pytest.raises(ValueError, match="wait=False"):
            first.load_state_from_peers(wait=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"custom_gradients": True}, "custom_gradients"),
        ({"reuse_tensors": True, "delta_rule_averaging": True}, "delta_rule_averaging"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "params": None,
          "offload_optimizer": True}, "offload_optimizer"),
        ({"average_opt_statistics": ["exp_avg"], "optimizer": partial(torch.optim.SGD, lr=1.0)}, "exp_avg"),
        ({"average_opt_statistics": ["exp_avg"], "initialize_optimizer": False}, "initialize_optimizer"),
        ({"average_opt_statistics": ["nothing"]}, "nothing"),
        ({"average_opt_statistics": "exp_avg"}, "a list of names"),
        ({"parameter_names": ["a"]}, "parameter_names"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], reason: str) -> None:
    (made,) = makers(linear(1), **{key: [value] for key, value in options.items()})
    with shoal.DHT(start=True) as dht, pytest.raises(ValueError, match=reason):
        made(dht=dht, prefix="test", start=False)


def test_steps_that_make_no_sense() -> None:
    with started(makers(linear(1))) as (averager,):
        for asked, reason in [
            ({"averaging_round": True, "wait_for_delayed_updates": False}, "averaging_round=True needs"),
            ({"optimizer_step": True, "delay_optimizer_step": True}, "offload_optimizer"),
            ({"averaging_control": averager.schedule_step(timeout=10.0)}, "averaging_control="),
            ({"wait_for_trigger": print}, "none was asked for"),
            ({"wait_for_trigger": print, "optimizer_step": True}, "wait_for_trigger= needs"),
        ]:
            with pytest.raises(ValueError, match=reason):
                averager.step(**asked)


def test_names_of_statistics_from_an_iterator() -> None:
    with started(makers(linear(1), average_opt_statistics=[iter(["exp_avg_sq"])])) as (averager,):
        assert averager.opt_keys_for_averaging == ("exp_avg_sq",)
        assert len(averager.get_current_state()[1]) == 4


def test_the_delta_rule_leaves_equal_counters_as_they_are() -> None:
    """Those that are too large for float32, in which they are averaged."""
    counters = [torch.tensor([2**24 + 1]) for _ in range(2)]
    made = makers(linear(2), extra_tensors=[[counter] for counter in counters], delta_rule_averaging=True)
    with started(made, target_group_size=2, min_matchmaking_time=20.0) as (first, second):
        first.step(averaging_round=True, delay_averaging=True)
        assert second.step(averaging_round=True) is not None
        assert first.step(wait_for_delayed_updates=True) is not None
    assert [int(counter) for counter in counters] == [2**24 + 1] * 2
