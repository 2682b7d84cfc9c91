"""Steps without a gradient: their samples do not count, and one line says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model

Alone = Callable[..., shoal.Optimizer]

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reused": {"reuse_grad_buffers": True},
    "delayed": {"delay_grad_averaging": True},
    "local": {"use_local_updates": True},
    "own": {"grad_averager_factory": shoal.GradientAverager},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["no backward", "zero_grad before step"])
def test_their_samples_do_not_count(alone: Alone, caplog: pytest.LogCaptureFixture, mode: str, how: str) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], **MODES[mode])
    start = flat(model)
    with caplog.at_level(logging.WARNING, "shoal"):
        for epoch in range(4):
            if how == "zero_grad before step":
                backward(model, *fixed_batch(epoch))
                model.zero_grad()
            optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 0
    assert optimizer.local_progress.samples_accumulated == 0
    assert torch.equal(flat(model), start)
    [line] = caplog.messages
    assert "64 samples, and no parameter has a gradient: they do not count; call backward() before step()" in line
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    optimizer.state_dict()
    assert optimizer.local_epoch == 1
    assert not torch.equal(flat(model), start)


def test_a_step_without_samples_says_nothing(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = alone(make_model(), target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    with caplog.at_level(logging.WARNING, "shoal"):
        optimizer.step(batch_size=0)
    assert caplog.messages == []


def test_one_parameter_with_a_gradient_is_enough(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    *_, last = model.parameters()
    last.grad = torch.ones_like(last)
    with caplog.at_level(logging.WARNING, "shoal"):
        optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 1
    assert caplog.messages == []


@pytest.mark.parametrize("reuse", [False, True])
def test_gradients_that_are_all_zero_count_and_are_told_of_once(
    alone: Alone, caplog: pytest.LogCaptureFixture, reuse: bool
) -> None:
    """`zero_grad(set_to_none=False)` at the wrong place looks like this; so does a batch that has nothing to say."""
    model = nn.Linear(10, 1)
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=reuse)
    with caplog.at_level(logging.WARNING, "shoal"):
        for epoch in range(2):
            backward(model, *fixed_batch(epoch), clear=False)
            model.zero_grad(set_to_none=False)
            optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 2
    [line] = caplog.messages
    assert "all gradients of this peer are zero in an epoch of 64 samples" in line
