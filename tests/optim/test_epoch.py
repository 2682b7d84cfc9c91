"""The states of a peer's epoch: which transition is made when, for peers that end epochs in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.optim.epoch import EpochState
from shoal.swarm.protocol.errors import Behind
from tests.optim.conftest import Alone
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model

ACCUMULATING, AVERAGING = EpochState.ACCUMULATING, EpochState.AVERAGING
STEPPING, FAILED, CLOSED = EpochState.STEPPING, EpochState.FAILED, EpochState.CLOSED


class Gate:
    """Holds a call until it is opened; then the call does what it did before, or raises an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.held: Callable[..., Any] = getattr(owner, name)
        self.error: Exception | None = None
        self.opened = threading.Event()
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        return self.held(*args, **kwargs)


def wait_until_done(optimizer: shoal.Optimizer) -> None:
    deadline = time.monotonic() + 60
    while not optimizer._epoch.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def begin(alone: Alone, **options: Any) -> tuple[torch.nn.Module, shoal.Optimizer]:
    """A peer that has the samples of its first epoch, and has not reported them."""
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], **options)
    backward(model, *fixed_batch(0))
    assert optimizer._epoch.state is ACCUMULATING
    return model, optimizer


def test_average_and_step_in_the_background(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = begin(alone, delay_grad_averaging=True)
    epoch, start = optimizer._epoch, flat(model)
    average, step = Gate(monkeypatch, epoch, "_average"), Gate(monkeypatch, epoch, "_step")
    optimizer.step(batch_size=64)
    assert epoch.state is AVERAGING
    optimizer.step(batch_size=8)
    assert epoch.state is AVERAGING
    average.opened.set()
    deadline = time.monotonic() + 60
    while epoch.state is not STEPPING:
        assert time.monotonic() < deadline
        optimizer.step(batch_size=0)
    assert optimizer.local_epoch == 0
    assert optimizer.local_progress.epoch == 1, "the next epoch has a name before the step is made"
    assert torch.equal(flat(model), start)
    step.opened.set()
    wait_until_done(optimizer)
    optimizer.step(batch_size=0)
    assert epoch.state is ACCUMULATING
    assert optimizer.local_epoch == 1
    assert not torch.equal(flat(model), start)


def test_only_the_step_in_the_background(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = begin(alone, delay_optimizer_step=True)
    step = Gate(monkeypatch, optimizer._epoch, "_step")
    optimizer.step(batch_size=64)
    assert optimizer._epoch.state is STEPPING
    step.opened.set()
    wait_until_done(optimizer)
    optimizer.step(batch_size=0)
    assert optimizer._epoch.state is ACCUMULATING
    assert optimizer.local_epoch == 1


def test_nothing_in_the_background(alone: Alone) -> None:
    _, optimizer = begin(alone)
    optimizer.step(batch_size=64)
    assert optimizer._epoch.state is ACCUMULATING
    assert optimizer.local_epoch == 1


def test_a_failure_is_tried_again_with_what_was_brought(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = begin(alone, delay_grad_averaging=True)
    epoch = optimizer._epoch
    average = Gate(monkeypatch, epoch, "_average")
    average.error = ArithmeticError("no average")
    average.opened.set()
    optimizer.step(batch_size=64)
    wait_until_done(optimizer)
    with pytest.raises(ArithmeticError, match="no average"):
        optimizer.step(batch_size=0)
    assert epoch.state is FAILED
    average.error = None
    average.opened.clear()
    optimizer.step(batch_size=0)
    assert epoch.state is AVERAGING
    average.opened.set()
    wait_until_done(optimizer)
    optimizer.step(batch_size=0)
    assert epoch.state is ACCUMULATING
    assert optimizer.local_epoch == 1


def test_another_state_ends_a_failure(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = begin(alone, delay_grad_averaging=True)
    saved = optimizer.state_dict()
    average = Gate(monkeypatch, optimizer._epoch, "_average")
    average.error = ArithmeticError("no average")
    average.opened.set()
    optimizer.step(batch_size=64)
    wait_until_done(optimizer)
    with pytest.raises(ArithmeticError):
        optimizer.step(batch_size=0)
    optimizer.load_state_dict(saved)
    assert optimizer._epoch.state is ACCUMULATING
    assert optimizer.local_progress.samples_accumulated == 0


def test_others_that_are_past_the_epoch_are_no_failure(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = begin(alone, delay_grad_averaging=True)
    epoch = optimizer._epoch
    synchronised: list[bool] = []
    monkeypatch.setattr(epoch, "_synchronise", lambda: synchronised.append(True))
    average = Gate(monkeypatch, epoch, "_average")
    average.error = Behind("the swarm is at epoch 5")
    average.opened.set()
    optimizer.step(batch_size=64)
    wait_until_done(optimizer)
    epoch.take_result(wait=False)
    assert epoch.state is ACCUMULATING
    assert synchronised


def test_a_state_that_the_background_may_bring_is_not_downloaded(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = begin(alone, delay_grad_averaging=True)
    epoch = optimizer._epoch
    better = optimizer._run.swarm.tip.after(bytes(32), 1e6)
    monkeypatch.setattr(type(optimizer._run.swarm), "behind", property(lambda run: better))
    assert epoch.is_behind
    assert epoch.priority() < 0
    average = Gate(monkeypatch, epoch, "_average")
    epoch._end_in_background(64.0)
    assert not epoch.is_behind
    assert epoch.priority() == 0
    average.error = Behind("as after a shutdown")
    average.opened.set()


def test_after_a_shutdown(alone: Alone) -> None:
    _, optimizer = begin(alone, delay_optimizer_step=True)
    optimizer.step(batch_size=64)
    optimizer.shutdown()
    assert optimizer._epoch.state is CLOSED
    assert optimizer.local_epoch == 1, "the step that was under way is applied"
