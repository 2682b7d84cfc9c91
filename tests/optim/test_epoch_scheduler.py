"""`shoal.EpochScheduler`: a scheduler that frameworks step after each batch follows the epochs of the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import shoal
from tests.optim.models import backward, fixed_batch, make_model

Alone = Callable[..., shoal.Optimizer]
MAKERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma=0.5)],
        milestones=[3],
    ),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def expected(make: Callable[[torch.optim.Optimizer], LRScheduler], epochs: int) -> list[tuple[float, float]]:
    """(learning rate, momentum) in each epoch, with torch alone."""
    local = sgd(make_model().parameters())
    schedule = make(local)
    found = []
    for _ in range(epochs):
        found.append((local.param_groups[0]["lr"], local.param_groups[0]["momentum"]))
        local.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "inner", "offload"),
    [(name, False, False) for name in MAKERS]
    + [("exponential", inner, offload) for inner, offload in ((True, False), (False, True), (True, True))],
)
def test_it_advances_once_per_epoch(alone: Alone, name: str, inner: bool, offload: bool) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=48, optimizer=sgd, offload_optimizer=offload)
    schedule = shoal.EpochScheduler(MAKERS[name](optimizer.optimizer if inner else optimizer))
    found: list[tuple[float, float]] = []
    optimizer.optimizer.register_step_pre_hook(
        lambda local, *_: found.append((local.param_groups[0]["lr"], local.param_groups[0]["momentum"]))
    )
    while optimizer.local_epoch < 7:
        backward(model, *fixed_batch(0))
        optimizer.step(batch_size=16)
        schedule.step()
    assert found == expected(MAKERS[name], 7)
    assert schedule.epoch == 7
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("name", MAKERS)
def test_it_catches_up_whatever_rate_was_downloaded(alone: Alone, name: str) -> None:
    """As a newcomer's: all epochs are behind it at once."""
    model = make_model()
    optimizer = alone(model, target_batch_size=16, optimizer=sgd)
    schedule = shoal.EpochScheduler(MAKERS[name](optimizer))
    backward(model, *fixed_batch(0))
    for _ in range(6):
        optimizer.step(batch_size=16)
    optimizer.param_groups[0]["lr"] = 0.001
    for _ in range(3):
        schedule.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == expected(MAKERS[name], 7)[6]


def test_it_goes_on_from_its_state(alone: Alone) -> None:
    models = [make_model() for _ in range(2)]
    optimizers = [alone(model, target_batch_size=16, optimizer=sgd) for model in models]
    for model in models:
        backward(model, *fixed_batch(0))
    first, second = (shoal.EpochScheduler(MAKERS["exponential"](optimizer)) for optimizer in optimizers)
    for _ in range(4):
        optimizers[0].step(batch_size=16)
        first.step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    second.load_state_dict(first.state_dict())
    assert optimizers[1].param_groups[0]["lr"] == 0.1 / 16
    second.step()
    assert optimizers[1].param_groups[0]["lr"] == 0.1 / 16
    for _ in range(2):
        optimizers[1].step(batch_size=16)
        second.step()
    assert optimizers[1].param_groups[0]["lr"] == 0.1 / 64
    with pytest.raises(ValueError, match="load that of a plain scheduler into it before it is wrapped"):
        second.load_state_dict(MAKERS["exponential"](optimizers[0]).state_dict())


def test_a_run_that_goes_back_waits_for_it(alone: Alone) -> None:
    """Another state with fewer epochs: the rate stays until the run is where it was."""
    model = make_model()
    optimizer = alone(model, target_batch_size=16, optimizer=sgd)
    backward(model, *fixed_batch(0))
    saved = optimizer.state_dict()
    schedule = shoal.EpochScheduler(MAKERS["exponential"](optimizer))
    rates = []
    for number in range(8):
        if number == 3:
            optimizer.load_state_dict(saved)
        epoch = optimizer.local_epoch
        while optimizer.local_epoch == epoch:
            optimizer.step(batch_size=16)
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [0.05, 0.025, 0.0125, 0.0125, 0.0125, 0.0125, 0.00625, 0.003125]


def test_frameworks_take_it_for_a_scheduler(alone: Alone) -> None:
    """What Trainer, Lightning and Accelerate ask of one."""
    optimizer = alone(make_model(), target_batch_size=16, optimizer=sgd)
    inner = MAKERS["one cycle"](optimizer)
    schedule = shoal.EpochScheduler(inner)
    assert isinstance(schedule, LRScheduler)
    assert not isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
    assert schedule.optimizer is optimizer
    assert schedule.total_steps == 20  # Accelerate asks whether there is one
    assert not hasattr(shoal.EpochScheduler(MAKERS["lambda"](optimizer)), "total_steps")
    count = schedule._step_count
    schedule._step_count += 1
    assert inner._step_count == count + 1
    assert schedule.base_lrs == inner.base_lrs
    assert schedule.last_epoch == inner.last_epoch

    class Accelerated(torch.optim.Optimizer):  # as Accelerate's: no constructor of its own, and groups of the inner one
        def __init__(self, given: torch.optim.Optimizer) -> None:
            self.optimizer = given

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.optimizer.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    assert shoal.EpochScheduler(MAKERS["lambda"](Accelerated(optimizer))).epoch == 0


def test_what_it_can_not_wrap(alone: Alone) -> None:
    local = sgd(make_model().parameters())
    with pytest.raises(ValueError, match=r"of a SGD that no shoal\.Optimizer has: make it of a shoal\.Optimizer"):
        shoal.EpochScheduler(MAKERS["lambda"](local))
    optimizer = alone(make_model(), target_batch_size=16, optimizer=sgd)
    make = functools.partial(lr_scheduler.ReduceLROnPlateau, optimizer)
    for wrong in (make(), shoal.EpochScheduler(MAKERS["lambda"](optimizer)), None):
        with pytest.raises(ValueError, match="give a torch scheduler that needs no metric"):
            shoal.EpochScheduler(wrong)  # type: ignore[arg-type]
