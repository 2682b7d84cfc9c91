"""Running statistics of layers are trained beside the parameters: who does not share them is told once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, make_model

Alone = Callable[..., shoal.Optimizer]


def normalized() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2)
    )


def test_layers_whose_statistics_are_not_shared_are_counted(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = normalized()
    with caplog.at_level(logging.WARNING, "shoal"):
        alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    [line] = caplog.messages
    assert "2 BatchNorm2d" in line
    assert "1 BatchNorm1d" in line
    assert "give extra_tensors=list(model.buffers())" in line


def untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))


def of_instances() -> nn.Module:
    return nn.InstanceNorm1d(2, affine=True)


def frozen() -> nn.Module:
    model = normalized()
    for layer in (model[1], model[2], model[5]):
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [make_model, untracked, frozen, of_instances])
def test_models_without_such_layers_hear_nothing(
    alone: Alone, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module]
) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        alone(make(), target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    assert caplog.messages == []


def test_who_shares_them_hears_nothing(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = normalized()
    with caplog.at_level(logging.WARNING, "shoal"):
        alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], extra_tensors=list(model.buffers()))
    assert caplog.messages == []
