"""Delayed and offloaded updates: what a peer computes with is exactly one epoch old, and nothing gets lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from tests.optim.ending import is_done
from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, fused, make_model, train_alone
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, five_more, fixed, stopped, training
from tests.waiting import wait_until

Alone = Callable[..., shoal.Optimizer]
SHARES = [(0, 8), (8, 40), (40, 64)]
EPOCHS = 8


def train_one_epoch_late(optimizer: str, scheduler: str, epochs: int) -> torch.Tensor:
    """In one process, with plain torch: each gradient is of the parameters of one epoch before."""
    model = make_model()
    local = OPTIMIZERS[optimizer](model.parameters())
    make = SCHEDULERS[scheduler]
    schedule = make(local) if make is not None else None
    parameters = list(model.parameters())
    newest, seen = ([parameter.detach().clone() for parameter in parameters] for _ in range(2))
    for epoch in range(epochs):
        for parameter, value in zip(parameters, seen, strict=True):
            parameter.data.copy_(value)
        backward(model, *fixed_batch(epoch))
        seen = newest
        for parameter, value in zip(parameters, newest, strict=True):
            parameter.data.copy_(value)
        local.step()
        if schedule is not None:
            schedule.step()
        newest = [parameter.detach().clone() for parameter in parameters]
    return flat(model)


@pytest.mark.parametrize("option", ["delay_grad_averaging", "delay_optimizer_step"])
def test_a_delayed_step_is_one_epoch_late(pool: Pool, option: str) -> None:
    with training(pool, 3, optimizer="adamw", scheduler="cosine", **{option: True}) as peers:
        told = [peer.tell(Training.delayed, share, EPOCHS) for peer, share in zip(peers.all, SHARES, strict=True)]
        answers = [answer() for answer in told]
        histories = [events(peer) for peer in peers.all]
    assert all([event["kind"] for event in history] == ["epoch"] * EPOCHS for history in histories), histories
    by_epoch(histories)
    assert all(answer == answers[0] for answer in answers)
    late = train_one_epoch_late("adamw", "cosine", EPOCHS)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), late, rtol=1e-4, atol=1e-5)
    assert (late - train_alone("adamw", "cosine", EPOCHS)).abs().max() > 1e-2, "there is no difference to see"


@pytest.mark.long
@pytest.mark.parametrize("option", ["offload_optimizer", "reuse_grad_buffers"])
def test_where_the_memory_is_changes_nothing(pool: Pool, option: str) -> None:
    """Peers may choose for themselves."""
    with training(pool, 3, optimizer="adamw", scheduler="cosine", **{option: [True, False, True]}) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS, [2] * len(peers.all))
        histories = [events(peer) for peer in peers.all]
    by_epoch(histories)
    assert all(answer == answers[0] for answer in answers)
    alone = train_alone("adamw", "cosine", EPOCHS)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), alone, rtol=1e-4, atol=1e-5)


def test_the_trainer_goes_on_during_the_round_and_the_step(alone: Alone) -> None:
    model = make_model()
    go_on = threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert threading.current_thread() is not threading.main_thread()
            assert go_on.wait(100)
            super().step(closure)

    optimizer = alone(
        model, target_batch_size=64, optimizer=lambda params: Slow(params, lr=0.1), delay_grad_averaging=True
    )
    start = flat(model)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    for _ in range(3):  # of the next epoch; less than it needs
        backward(model, *fixed_batch(1))
        began = time.perf_counter()
        optimizer.step(batch_size=16)
        assert time.perf_counter() - began < 60.0
    assert optimizer.local_epoch == 0
    assert torch.equal(flat(model), start), "the parameters changed under the trainer's hands"
    go_on.set()
    while optimizer.local_epoch == 0:
        optimizer.step(batch_size=0)
    assert not torch.equal(flat(model), start)
    assert optimizer.tracker.local_progress.samples_accumulated == 48


def test_state_of_the_optimizer_is_on_the_host_and_its_options_are_shared(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], delay_optimizer_step=True)
    inner = [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
    outer = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(outer, model.parameters(), strict=True))
    assert not {parameter.data_ptr() for parameter in inner} & {parameter.data_ptr() for parameter in outer}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.step(batch_size=0)
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.01
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    optimizer.state_dict()  # waits for the step
    assert torch.equal(flat(model), torch.cat([parameter.detach().flatten() for parameter in inner]))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, {"outer": shoal.DiLoCo(inner_steps=4)}], ids=["epochs", "diloco"])
def test_on_the_host_and_without_delays_an_offloaded_optimizer_steps_the_model_itself(
    alone: Alone, options: dict[str, Any]
) -> None:
    model = make_model()
    target = {} if options else {"target_batch_size": 64}
    optimizer = alone(model, optimizer=OPTIMIZERS["adamw"], offload_optimizer=True, **options, **target)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    assert all("exp_avg" in optimizer.state[parameter] for parameter in model.parameters())


def test_errors_of_the_background_surface_in_the_next_step(alone: Alone) -> None:
    model = make_model()

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError("the step broke")

    optimizer = alone(
        model, target_batch_size=64, optimizer=lambda params: Broken(params, lr=0.1), delay_optimizer_step=True
    )
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    deadline = time.monotonic() + 60
    while not is_done(optimizer._epoch):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ArithmeticError, match="the step broke"):
        optimizer.step(batch_size=0)


def end_epoch(optimizer: shoal.Optimizer, batch_size: int) -> None:
    """Make a step with so many samples, and then wait until the first epoch is over."""
    deadline = time.monotonic() + 60
    optimizer.step(batch_size=batch_size)
    while optimizer.local_epoch == 0:
        optimizer.step(batch_size=0)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("option", ["delay_grad_averaging", "delay_optimizer_step", None])
def test_a_step_that_failed_is_made_with_the_same_average(alone: Alone, option: str | None) -> None:
    """Nobody else has it who could be asked, and what was accumulated since is for the next epoch."""
    model, plain = make_model(), make_model()

    class BreaksOnce(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if not self.broken:
                self.broken = True
                raise ArithmeticError("the step broke")
            super().step()

    optimizer = alone(
        model,
        target_batch_size=64,
        optimizer=lambda params: BreaksOnce(params, lr=0.1),
        **({} if option is None else {option: True}),
    )
    backward(model, *fixed_batch(0))
    with pytest.raises(ArithmeticError, match="the step broke"):
        end_epoch(optimizer, 64)
    assert optimizer.local_epoch == 0
    if option is not None:
        backward(model, *fixed_batch(1))
        optimizer.step(batch_size=48)
    end_epoch(optimizer, 0)
    backward(plain, *fixed_batch(0))
    fused(torch.optim.SGD(plain.parameters(), lr=0.1)).step()
    assert torch.equal(flat(model), flat(plain))
    assert optimizer.tracker.local_progress.samples_accumulated == (0 if option is None else 48)
    assert optimizer.local_epoch == optimizer.tracker.global_epoch == 1


def test_a_checkpoint_waits_for_what_is_under_way(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], delay_grad_averaging=True)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    weights = model.state_dict()  # as one does: before the optimizer's
    saved = optimizer.state_dict()
    assert saved["state"]["local_epoch"] == optimizer.local_epoch == 1
    again = make_model(seed=9)
    other = alone(again, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], delay_grad_averaging=True)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    for net, one in ((model, optimizer), (again, other)):
        backward(net, *fixed_batch(1))
        one.step(batch_size=64)
        one.state_dict()
    assert torch.equal(flat(model), flat(again))


def test_a_checkpoint_after_a_shutdown_waits_for_a_slow_step(alone: Alone) -> None:
    slow = threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            slow.wait(20.0)
            return super().step(closure)

    model = make_model()
    optimizer = alone(
        model,
        target_batch_size=64,
        optimizer=lambda params: Slow(params, lr=0.1, momentum=0.9),
        delay_optimizer_step=True,
        shutdown_timeout=0.1,
    )
    start = flat(model)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    optimizer.shutdown()
    assert torch.equal(flat(model), start), "the step is under way"
    threading.Timer(0.5, slow.set).start()
    saved = optimizer.state_dict()
    assert saved["state"]["local_epoch"] == optimizer.local_epoch == 1
    assert saved["state"][0]["momentum_buffer"].any()
    assert not torch.equal(flat(model), start), "the model's parameters belong to the dict"


def test_shutdown_in_the_middle(dht: shoal.DHT) -> None:
    """Of a round that can't end: the others are not there."""
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as elsewhere:
        models = [make_model(), make_model()]
        made = [
            shoal.Optimizer(
                dht=place,
                run_id="shutdown",
                target_batch_size=64,
                params=model.parameters(),
                optimizer=OPTIMIZERS["sgd"],
                delay_grad_averaging=True,
                matchmaking_time=60.0,
                averaging_timeout=60.0,
            )
            for place, model in zip((dht, elsewhere), models, strict=True)
        ]
        start = flat(models[0])
        backward(models[0], *fixed_batch(0))
        made[0].step(batch_size=64)
        began = time.monotonic()
        made[0].shutdown()
        assert time.monotonic() - began < 40.0
        assert torch.equal(flat(models[0]), start)
        assert all("shoal-update" not in thread.name for thread in threading.enumerate())
        made[1].shutdown()


def test_a_kill_during_a_round_in_the_background(pool: Pool) -> None:
    with training(pool, 3, optimizer="adamw", delay_grad_averaging=True) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: len(events(peers.all[0])) >= 4)
        victim, *survivors = peers.all
        victim.ask(Training.die_as_coordinator)
        victim.process.wait(100)
        _, histories = five_more(survivors)
    by_epoch(histories)
    assert all(event["kind"] == "epoch" for history in histories for event in history), "a survivor had to download"
    assert all([event["peers"] for event in history[-3:]] == [2, 2, 2] for history in histories)


@pytest.mark.long
def test_mixed_swarm_where_peers_may_choose(pool: Pool) -> None:
    """batch_size_per_step, client_mode, auxiliary, reuse_grad_buffers, offload_optimizer and verbose."""
    with training(
        pool,
        4,
        optimizer="adamw",
        scheduler="steps",
        batch_size_per_step=[8, 16, None, None],
        client_mode=[None, True, None, None],
        auxiliary=[False, False, True, False],
        reuse_grad_buffers=[True, False, False, False],
        offload_optimizer=[None, True, None, False],
        verbose=[False, False, False, True],
        matchmaking_time=3.0,
    ) as peers:
        node, client, helper, other = peers.all
        for peer, batch in ((node, 8), (client, 16), (helper, 0), (other, 8)):
            peer.ask(Training.train, batch=batch, pause=0.03)
        wait_until(lambda: sum(event.get("peers") == 4 for event in events(node)) >= 4)
        states = stopped(peers.all)
        histories = [events(peer) for peer in (node, client, other)]
    by_epoch(histories)
    del states[2]
    assert all(state == states[0] for state in states)
