"""Objects that are peers say that they are not copied, and what to do; everything else is copied as with torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.sharding import GradScaler
from tests.optim.conftest import Alone


def through_torch_save(given: Any) -> Any:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, through_torch_save, lambda given: pickle.loads(pickle.dumps(given))]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("way", [*WAYS, copy.copy])
def test_peers_are_not_copied(dht: shoal.DHT, alone: Alone, way: Callable[[Any], Any]) -> None:
    model, given = nn.Linear(2, 2), {"dht": dht, "prefix": "p", "start": False}
    peers = [
        alone(model, optimizer=sgd, target_batch_size=1),
        dht,
        shoal.DecentralizedAverager([torch.ones(2)], **given),
        shoal.GradientAverager(nn.Linear(2, 2).parameters(), **given),
        shoal.TrainingStateAverager(params=nn.Linear(2, 2).parameters(), optimizer=sgd, **given),
        shoal.ProgressTracker(dht=dht, prefix="q", target_batch_size=2, start=False),
    ]
    for peer in peers:
        with pytest.raises(
            TypeError, match=rf"a (shoal\.)?{type(peer).__name__} is neither copied nor pickled, for it"
        ):
            way(peer)


@pytest.mark.parametrize("way", WAYS)
def test_a_scheduler_of_the_run_is_not_copied_either(alone: Alone, way: Callable[[Any], Any]) -> None:
    optimizer = alone(nn.Linear(2, 2), optimizer=sgd, target_batch_size=1)
    scheduler = shoal.EpochScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(TypeError, match=r"a shoal\.Optimizer is neither copied nor pickled"):
        way(scheduler)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_a_run_is_copied_and_so_is_its_wrapped_optimizer(alone: Alone, way: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 2)
    given = {"target_batch_size": 1, "batch_size_per_step": 1, "optimizer": sgd}
    optimizer = alone(model, **given)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other, wrapped = way((model, optimizer.optimizer))
    before, kept = model.weight.detach().clone(), other.weight.detach().clone()
    assert torch.equal(before, kept)
    other(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    assert torch.equal(model.weight, before)
    assert not torch.equal(other.weight, kept)


@pytest.mark.parametrize("made", [shoal.GradScaler, GradScaler])
@pytest.mark.parametrize("way", [*WAYS, copy.copy])
def test_a_scaler_is_copied_as_torchs_is(made: Any, way: Callable[[Any], Any]) -> None:
    scaler = made("cpu", init_scale=8.0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    other = way(scaler)
    assert other.get_scale() == 8.0
    assert other.state_dict() == scaler.state_dict()
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    other.scale(model(torch.ones(1, 2)).sum()).backward()
    other.step(optimizer)
    other.update()
    torch.testing.assert_close(model.weight, before - 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_that_holds_the_sum_of_an_epoch_is_copied_without_it(alone: Alone, way: Callable[[Any], Any]) -> None:
    model, scaler = nn.Linear(2, 2), shoal.GradScaler("cpu", init_scale=8.0)
    optimizer = alone(model, optimizer=sgd, target_batch_size=4, batch_size_per_step=1, reuse_grad_buffers=True)
    scaler._holding.add(optimizer)
    other = way(scaler)
    assert list(other._holding) == []
    assert list(scaler._holding) == [optimizer]
