"""Sparse gradients: SGD and Adagrad have torch's numbers in every mode; SparseAdam too, or it is refused when made."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.compression import NoCompression
from shoal.optim.state import TrainingState
from tests.optim.conftest import Alone
from tests.optim.test_state import TIP, downloaded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own Adagrad causes it
ROWS = [[1, 4, 4], [0, 4, 8], [2, 2, 2], [8, 0, 1]]
SGD, MOMENTUM, ADAGRAD, SPARSE_ADAM = (
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
    lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
)
DENSE_TOO = pytest.mark.parametrize("make", [SGD, MOMENTUM, ADAGRAD], ids=["SGD", "momentum", "Adagrad"])
EACH_STEP_IS_AN_EPOCH: dict[str, Any] = {"target_batch_size": 1, "batch_size_per_step": 1}
ONE_PEER = shoal.DiLoCo(inner_steps=1, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))  # it goes to the model
AVERAGED: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in place": {"reuse_grad_buffers": True},
    "clipped": {"max_grad_norm": 0.5},
    "on the host": {"offload_optimizer": True},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
    "own averager in place": {"grad_averager_factory": shoal.GradientAverager, "reuse_grad_buffers": True},
}
OWN: dict[str, dict[str, Any]] = {
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "outer": {"outer": ONE_PEER, "target_batch_size": None},
    "outer on the host": {"outer": ONE_PEER, "target_batch_size": None, "offload_optimizer": True},
}


def tables(rows: int = 9) -> tuple[nn.Embedding, nn.Embedding]:
    torch.manual_seed(0)
    ours, plain = nn.Embedding(rows, 3, sparse=True), nn.Embedding(rows, 3, sparse=True)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def loss_of(table: nn.Embedding, rows: list[int]) -> torch.Tensor:
    loss: torch.Tensor = table(torch.tensor(rows)).square().sum()
    return loss


def train(
    optimizer: shoal.Optimizer,
    ours: nn.Embedding,
    local: torch.optim.Optimizer,
    plain: nn.Embedding,
    max_grad_norm: float = math.inf,
) -> None:
    for rows in ROWS:
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()
        loss_of(ours, rows).backward()
        optimizer.step()
        local.zero_grad()
        loss_of(plain, rows).backward()
        assert plain.weight.grad is not None
        assert plain.weight.grad.is_sparse
        norm = float(plain.weight.grad.to_dense().norm())
        plain.weight.grad *= min(1.0, max_grad_norm / norm)
        local.step()


@pytest.mark.parametrize("mode", [*AVERAGED, *OWN])
@DENSE_TOO
def test_the_numbers_are_torchs(alone: Alone, mode: str, make: Any) -> None:
    """To rounding: torch adds the rows in another order."""
    ours, plain = tables()
    given = {**EACH_STEP_IS_AN_EPOCH, **{**AVERAGED, **OWN}[mode]}
    optimizer = alone(ours, optimizer=make, **given)
    train(optimizer, ours, make(plain.parameters()), plain, given.get("max_grad_norm", math.inf))
    assert optimizer.local_epoch == len(ROWS)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", OWN)
def test_sparse_adam_steps_this_peers_own_gradients(alone: Alone, mode: str) -> None:
    ours, plain = tables()
    optimizer = alone(ours, optimizer=SPARSE_ADAM, **{**EACH_STEP_IS_AN_EPOCH, **OWN[mode]})
    train(optimizer, ours, SPARSE_ADAM(plain.parameters()), plain)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-5, atol=1e-6)


class Renamed(torch.optim.SparseAdam):
    pass


@pytest.mark.parametrize("mode", [*AVERAGED, "auxiliary", "delayed"])
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, Renamed, type("SparseAdam", (torch.optim.SGD,), {})])
def test_sparse_adam_is_refused_where_it_would_step_the_average(dht: shoal.DHT, mode: str, kind: Any) -> None:
    ours, _ = tables()
    before = ours.weight.data_ptr(), threading.enumerate()
    more: dict[str, dict[str, Any]] = {
        "auxiliary": {"auxiliary": True, "batch_size_per_step": None},
        "delayed": {"delay_grad_averaging": True},
    }
    given: dict[str, Any] = {**EACH_STEP_IS_AN_EPOCH, **{**AVERAGED, **more}[mode]}
    with pytest.raises(ValueError, match=rf"optimizer= is a {kind.__name__}, which steps only .*SGD or Adagrad"):
        shoal.Optimizer(dht=dht, run_id="s", params=ours.parameters(), optimizer=lambda p: kind(list(p)), **given)
    assert (ours.weight.data_ptr(), threading.enumerate()) == before


def test_sparse_adam_is_refused_as_the_outer_optimizer(dht: shoal.DHT) -> None:
    ours, _ = tables()
    outer = shoal.DiLoCo(optimizer=SPARSE_ADAM)
    with pytest.raises(ValueError, match=r"DiLoCo\(optimizer=…\) is a SparseAdam, which steps only the rows"):
        shoal.Optimizer(
            dht=dht, run_id="s", params=ours.parameters(), optimizer=SGD, outer=outer, **EACH_STEP_IS_AN_EPOCH
        )


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    "make", [SGD, MOMENTUM, ADAGRAD, SPARSE_ADAM], ids=["SGD", "momentum", "Adagrad", "SparseAdam"]
)
def test_a_state_averager_steps_as_torch(dht: shoal.DHT, make: Any, on_host: bool) -> None:
    ours, plain = tables()
    averager = shoal.TrainingStateAverager(
        dht=dht, prefix="s", start=False, params=ours.parameters(), optimizer=make, offload_optimizer=on_host
    )
    local = make(plain.parameters())
    for rows in ROWS:
        loss_of(ours, rows).backward()
        averager.step(optimizer_step=True, zero_grad=True)
        local.zero_grad()
        loss_of(plain, rows).backward()
        local.step()
    averager.shutdown()
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_sparse_momentum_is_dense_when_it_is_taken_over_and_sent(flat: bool) -> None:
    """What torch's SGD has made before, and what a checkpoint of it holds."""
    ours, plain = tables()
    local = MOMENTUM(ours.parameters())
    loss_of(ours, ROWS[0]).backward()
    local.step()
    kept = local.state[ours.weight]["momentum_buffer"]
    assert kept.is_sparse
    state = TrainingState(local, None, [], flat=flat)
    assert torch.equal(local.state[ours.weight]["momentum_buffer"], kept.to_dense())
    local.state[ours.weight]["momentum_buffer"] = kept  # as a later step makes it
    newcomer = TrainingState(MOMENTUM(plain.parameters()), None, [])
    newcomer.load(downloaded(state.snapshot(TIP, NoCompression())))
    assert torch.equal(newcomer.optimizer.state[plain.weight]["momentum_buffer"], kept.to_dense())
