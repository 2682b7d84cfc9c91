"""One thread trains, the DHT ends after the optimizer, and nobody copies a peer: what else is tried says so."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model

Alone = Callable[..., shoal.Optimizer]


def test_a_second_thread_is_refused_while_the_first_is_in_step(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    entered, go_on = threading.Event(), threading.Event()

    def closure() -> torch.Tensor:
        entered.set()
        assert go_on.wait(100)
        return backward(model, *fixed_batch(0))

    trainer = threading.Thread(target=optimizer.step, args=(closure, 64))
    trainer.start()
    assert entered.wait(100)
    saved: dict[str, Any] = {"state": {}, "param_groups": []}
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: optimizer.step(batch_size=64),
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "load_state_from_peers": optimizer.load_state_from_peers,
    }
    try:
        for method, call in calls.items():
            with pytest.raises(
                RuntimeError, match=rf"{method}\(\) was called while another thread .*one thread trains"
            ):
                call()
    finally:
        go_on.set()
        trainer.join()
    assert optimizer.local_epoch == 1
    optimizer.step(batch_size=64)  # and when that one is out, this thread may go on
    assert optimizer.local_epoch == 2


def test_who_hears_of_an_epoch_may_save_the_state(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    saved: list[Any] = []
    optimizer.on_event = lambda event: saved.append(optimizer.state_dict())
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    [state] = saved
    assert state["state"]["local_epoch"] == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
def test_it_is_neither_copied_nor_pickled(alone: Alone, duplicate: Callable[[Any], Any]) -> None:
    optimizer = alone(make_model(), target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*state_dict\(\)"):
        duplicate(optimizer)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "delayed": {"delay_grad_averaging": True},
    "local": {"use_local_updates": True},
    "own": {"grad_averager_factory": shoal.GradientAverager},
    "auxiliary": {"auxiliary": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_dht_that_was_shut_down_first_is_named(mode: str) -> None:
    model = make_model()
    dht = shoal.DHT(start=True)
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="first",
        target_batch_size=128,
        params=model.parameters(),
        optimizer=OPTIMIZERS["sgd"],
        **MODES[mode],
    )
    backward(model, *fixed_batch(0))
    if mode != "auxiliary":
        optimizer.step(batch_size=64)
    before = flat(model)
    dht.shutdown()
    calls: list[Callable[[], Any]] = [
        optimizer.step if mode == "auxiliary" else lambda: optimizer.step(batch_size=64),
        optimizer.load_state_from_peers,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ]
    for call in calls * 2:
        with pytest.raises(
            RuntimeError, match="the DHT of this optimizer was shut down: shut the optimizer down first"
        ):
            call()
    assert optimizer.state_dict()["state"]["local_epoch"] == 0
    assert not optimizer.is_alive()
    optimizer.shutdown()
    assert torch.equal(flat(model), before)


@pytest.mark.usefixtures("others_are_awaited")
def test_a_step_that_waits_in_a_round_ends_with_the_dht(dht: shoal.DHT) -> None:
    elsewhere = shoal.DHT(dht.get_visible_maddrs(), start=True)
    models = [make_model(), make_model()]
    made = [
        shoal.Optimizer(
            dht=place,
            run_id="in step",
            target_batch_size=64,
            params=model.parameters(),
            optimizer=OPTIMIZERS["sgd"],
            matchmaking_time=60.0,
        )
        for place, model in zip((dht, elsewhere), models, strict=True)
    ]
    backward(models[1], *fixed_batch(0))
    trainer = threading.Thread(target=made[1].step, kwargs={"batch_size": 64})  # the other does not come
    trainer.start()
    while not made[1]._run.swarm.called:
        time.sleep(0.01)
    elsewhere.shutdown()
    trainer.join(40)
    assert not trainer.is_alive()
    with pytest.raises(RuntimeError, match="the DHT of this optimizer was shut down"):
        made[1].step(batch_size=64)
    made[1].shutdown()
    made[0].shutdown()


@pytest.mark.usefixtures("others_are_awaited")
@pytest.mark.parametrize("own", [False, True])
def test_a_dht_that_was_shut_down_under_a_round_in_the_background(dht: shoal.DHT, own: bool) -> None:
    """The round ends at once, and so does what waits for it."""
    elsewhere = shoal.DHT(dht.get_visible_maddrs(), start=True)
    options = {"grad_averager_factory": shoal.GradientAverager} if own else {}
    models = [make_model(), make_model()]
    made = [
        shoal.Optimizer(
            dht=place,
            run_id=f"under {own}",
            target_batch_size=64,
            params=model.parameters(),
            optimizer=OPTIMIZERS["sgd"],
            delay_grad_averaging=True,
            matchmaking_time=60.0,
            **options,
        )
        for place, model in zip((dht, elsewhere), models, strict=True)
    ]
    start = flat(models[1])
    backward(models[1], *fixed_batch(0))
    made[1].step(batch_size=64)  # the other does not come
    assert made[1]._epoch.is_busy
    began = time.monotonic()
    elsewhere.shutdown()
    assert made[1].state_dict()["state"]["local_epoch"] == 0
    made[1].shutdown()
    assert time.monotonic() - began < 40.0
    assert torch.equal(flat(models[1]), start)
    assert all("shoal-update" not in thread.name for thread in threading.enumerate())
    made[0].shutdown()


def test_one_that_can_not_share_its_state_leaves_the_run(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shoal.optim.progress.RunProgress.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone(make_model(), run_id="again", target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    model = make_model()
    optimizer = alone(model, run_id="again", target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 1
