"""What `step`, `zero_grad` and the rest do in one process: as torch's optimizers do, wherever that can be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.swarm.swarm import Swarm
from tests.optim.models import backward, fixed_batch, flat, fused, make_model

Alone = Callable[..., shoal.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)


def weight(model: nn.Sequential, layer: int) -> nn.Parameter:
    found = model[layer].weight
    assert isinstance(found, nn.Parameter)
    return found


def test_nothing_moves_before_the_target_is_reached(alone: Alone) -> None:
    model, plain = make_model(), make_model()
    optimizer = alone(model, target_batch_size=64, batch_size_per_step=16, optimizer=sgd)
    local = sgd(plain.parameters())
    start = flat(model)
    inputs, outputs = fixed_batch(0)
    for first in (0, 16, 32):
        backward(model, inputs[first : first + 16], outputs[first : first + 16])
        assert optimizer.step() is None
        assert torch.equal(flat(model), start)
        assert optimizer.local_epoch == 0
        assert optimizer.tracker.local_progress.samples_accumulated == first + 16
    backward(model, inputs[48:], outputs[48:])
    optimizer.step()
    assert optimizer.local_epoch == 1
    assert optimizer.tracker.local_progress.samples_accumulated == 0
    backward(plain, inputs, outputs)
    local.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-6, atol=1e-7)


def test_steps_weigh_by_their_samples(alone: Alone) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = alone(model, target_batch_size=10, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    for gradient, samples in ((1.0, 2), (3.0, 3), (100.0, 0), (2.0, 5)):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step(batch_size=samples)
    assert optimizer.local_epoch == 1
    assert model.weight.item() == pytest.approx(-(1 * 2 + 3 * 3 + 2 * 5) / 10)


def test_a_step_without_samples_adds_nothing_and_ends_the_epoch(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=16, optimizer=sgd)
    start = flat(model)
    backward(model, *fixed_batch(0))
    for _ in range(3):
        optimizer.step(batch_size=0)
    assert torch.equal(flat(model), start)
    assert optimizer.tracker.local_progress.samples_accumulated == 0


def test_step_needs_to_know_how_many_samples(alone: Alone) -> None:
    optimizer = alone(make_model(), target_batch_size=16, optimizer=sgd)
    with pytest.raises(ValueError, match=r"batch_size=.*batch_size_per_step"):
        optimizer.step()
    for wrong in (-1, float("nan"), float("inf"), "8"):
        with pytest.raises(ValueError, match=f"batch_size={wrong!r}"):
            optimizer.step(batch_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grad_scaler.*shoal\.GradScaler"):
        optimizer.step(batch_size=1, grad_scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


def test_closure(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=sgd)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        return backward(model, *fixed_batch(0))

    with torch.no_grad():
        loss = optimizer.step(closure, batch_size=64)
    assert isinstance(loss, torch.Tensor)
    assert loss > 0
    assert optimizer.local_epoch == 1


def test_gradients_stay_the_users(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=sgd)
    backward(model, *fixed_batch(0))
    before = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in before if gradient is not None]
    optimizer.step(batch_size=64)
    assert optimizer.local_epoch == 1
    for parameter, gradient, value in zip(model.parameters(), before, values, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert torch.equal(value, gradient)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameter_groups_and_frozen_parameters(alone: Alone) -> None:
    model, plain = make_model(), make_model()

    def grouped(net: nn.Sequential) -> list[dict[str, Any]]:
        weight(net, 0).requires_grad_(False)
        return [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}, {"params": weight(net, 4)}]

    optimizer = alone(model, params=grouped(model), target_batch_size=64, optimizer=adamw)
    local = fused(adamw(grouped(plain)))
    frozen = weight(model, 0).clone()
    for epoch in range(3):
        backward(model, *fixed_batch(epoch))
        optimizer.step(batch_size=64)
        backward(plain, *fixed_batch(epoch))
        local.step()
    assert optimizer.local_epoch == 3
    assert torch.equal(flat(model), flat(plain))  # the same fused kernel on tensors of the same shapes
    assert torch.equal(weight(model, 0), frozen), "weight decay moved a frozen parameter"
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1, 0.1]
    optimizer.param_groups[1]["lr"] = 0.0  # as a scheduler of the user's own would do
    second = flat(model[2])
    backward(model, *fixed_batch(3))
    optimizer.step(batch_size=64)
    assert torch.equal(flat(model[2]), second)

    weight(model, 0).requires_grad_(True)
    backward(model, *fixed_batch(4))
    with pytest.raises(ValueError, match=r"frozen.*new optimizer"):
        optimizer.step(batch_size=64)
    with pytest.raises(ValueError, match="parameters of a run are fixed"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_parameters_without_a_gradient_are_left_alone(alone: Alone) -> None:
    """As torch does: neither momentum nor weight decay moves them; but one gradient in the epoch is enough."""
    model, plain = make_model(), make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=adamw)
    local = adamw(plain.parameters())
    inputs, outputs = fixed_batch(0)
    for epoch in range(3):
        backward(plain, inputs, outputs)
        if epoch < 2:
            weight(plain, 2).grad = None
        local.step()
        for first in (0, 32):
            backward(model, inputs[first : first + 32], outputs[first : first + 32])
            if epoch < 2:
                weight(model, 2).grad = None
            optimizer.step(batch_size=32)
        assert optimizer.local_epoch == epoch + 1
        torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-5)
        assert (weight(model, 2) in optimizer.state) == (epoch == 2)

    untouched, before = weight(model, 2).clone(), weight(model, 0).clone()
    optimizer.zero_grad()
    weight(model, 0).grad = torch.full_like(weight(model, 0), 2.0)
    optimizer.step(batch_size=32)
    optimizer.zero_grad()
    weight(model, 4).grad = torch.ones_like(weight(model, 4))
    optimizer.step(batch_size=32)
    assert optimizer.local_epoch == 4
    assert torch.equal(weight(model, 2), untouched), "a gradient of the epoch before counted"
    assert not torch.equal(weight(model, 0), before)


def test_a_gradient_that_is_missing_counts_as_zeros(alone: Alone) -> None:
    """Where others of the epoch have one, as the samples of a batch that do not use a parameter."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = alone(model, target_batch_size=32, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    model.weight.grad = torch.full_like(model.weight, 4.0)
    optimizer.step(batch_size=8)
    optimizer.zero_grad()
    model.bias.grad = torch.full_like(model.bias, 4.0)
    optimizer.step(batch_size=24)
    assert optimizer.local_epoch == 1
    assert (model.weight.item(), model.bias.item()) == (-1.0, -3.0)


def test_mixed_and_sparse(alone: Alone) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(8, 4, sparse=True)
            self.rough = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.exact = nn.Linear(4, 1, dtype=torch.float64)
            self.strided = nn.Parameter(torch.randn(4, 3).t())

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            hidden = self.rough(self.table(index).bfloat16())
            return (self.exact(hidden.double()) + self.strided.sum()).mean()

    model, plain = Mixed(), Mixed()
    optimizer = alone(model, target_batch_size=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    local = torch.optim.SGD(plain.parameters(), lr=0.1)
    for index in (torch.tensor([1, 2, 2, 5]), torch.tensor([0, 7, 7, 7])):
        for net in (model, plain):
            net.zero_grad()
            net(index).backward()
        optimizer.step(batch_size=4)
        local.step()
    assert optimizer.local_epoch == 2
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs)


def test_ready_made_optimizer_and_scheduler(alone: Alone) -> None:
    model = make_model()
    local = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(local, step_size=2, gamma=0.1)
    optimizer = alone(model, params=None, optimizer=local, scheduler=schedule, target_batch_size=64)
    assert isinstance(optimizer, torch.optim.Optimizer)
    rates = []
    for epoch in range(4):
        for _ in range(2):
            backward(model, *fixed_batch(epoch))
            optimizer.step(batch_size=32)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert schedule.last_epoch == 4
    assert optimizer.state is local.state


def test_a_scheduler_of_ones_own_on_the_outside(alone: Alone) -> None:
    """What a script written for torch has: it works on the same parameter groups."""
    optimizer = alone(make_model(), target_batch_size=64, optimizer=sgd)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.step(batch_size=0)
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05


def test_extra_gradients_that_are_not_finite_are_dropped(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=adamw)
    start = flat(model)
    backward(model, *fixed_batch(0))
    next(model.parameters()).grad.view(-1)[3] = float("inf")  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING, "shoal"):
        optimizer.step(batch_size=64)
    assert "not finite" in caplog.text
    assert torch.equal(flat(model), start)
    for epoch in range(2):
        backward(model, *fixed_batch(epoch))
        optimizer.step(batch_size=64)
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), start)


def test_reports_and_progress(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=sgd, verbose=False)
    events: list[Any] = []
    optimizer.on_event = events.append
    assert optimizer.tracker.global_progress.samples_accumulated == 0
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=48)
    progress = optimizer.tracker.global_progress
    assert (progress.epoch, progress.samples_accumulated, progress.num_peers) == (0, 48, 1)
    assert shoal.get_dht_time() < optimizer.tracker.estimated_next_update_time < shoal.get_dht_time() + 60
    optimizer.step(batch_size=16)
    [report] = events
    assert isinstance(report, shoal.EpochReport)
    assert (report.epoch, report.samples, report.num_peers) == (1, 64, 1)
    assert report.coordinator == str(optimizer.dht.peer_id)
    assert report.round_seconds == pytest.approx(report.matchmaking_seconds + report.allreduce_seconds)
    assert optimizer.tracker.global_epoch == 1
    assert "epoch=1" in repr(optimizer)


def test_names_of_the_reference(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=sgd)
    assert optimizer.opt is optimizer.optimizer
    assert optimizer.state_averager is optimizer.grad_averager is optimizer
    assert optimizer.scheduled_grads is optimizer.scheduled_state is None
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=48)
    assert optimizer.local_progress == optimizer.tracker.local_progress
    assert optimizer.local_progress.samples_accumulated == 48
    assert optimizer.is_synchronized_with_peers()
    tip = optimizer._run.swarm.tip
    for epochs, in_step in ((1, True), (2, False)):
        tip = tip.after(bytes(32), 64.0)
        monkeypatch.setattr(Swarm, "behind", tip)
        assert optimizer.tracker.global_epoch == epochs
        assert optimizer.is_synchronized_with_peers() == in_step
    assert optimizer.is_alive()
    optimizer.shutdown()
    assert not optimizer.is_alive()


def test_what_averages_gradients(alone: Alone) -> None:
    optimizer = alone(make_model(), run_id="local", target_batch_size=64, optimizer=sgd, use_local_updates=True)
    assert optimizer.grad_averager is None
    own = alone(make_model(), target_batch_size=64, optimizer=sgd, grad_averager_factory=shoal.GradientAverager)
    assert isinstance(own.grad_averager, shoal.GradientAverager)
    assert own.grad_averager.is_alive()
    own.shutdown()
    assert not own.grad_averager.is_alive()


def test_shutdown(dht: shoal.DHT) -> None:
    model = make_model()
    optimizer = shoal.Optimizer(
        dht=dht, run_id="over", target_batch_size=8, params=model.parameters(), optimizer=sgd, averaging_timeout=20
    )
    optimizer.shutdown()
    optimizer.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        optimizer.step(batch_size=8)
    assert dht.is_alive()
    assert dht.store("key", "value", shoal.get_dht_time() + 60)
    backward(model, *fixed_batch(0))  # the parameters are still the user's

    again = shoal.Optimizer(
        dht=dht, run_id="over", target_batch_size=8, params=model.parameters(), optimizer=sgd, matchmaking_time=100
    )
    started = time.monotonic()
    again.step(batch_size=8)
    assert again.local_epoch == 1
    assert time.monotonic() - started < 60, "it waited for its former self"
    dht.shutdown()
    again.shutdown()
