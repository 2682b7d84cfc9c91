"""With `reuse_grad_buffers`, gradients that somebody clears between two steps are missed, and not silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, fused, make_model

Alone = Callable[..., shoal.Optimizer]
SAYS = r"accumulates in \.grad, and that of parameter 0 \('weight' of a Linear\) was cleared .*model\.zero_grad\(\)"


def make(alone: Alone, model: nn.Module, **arguments: Any) -> shoal.Optimizer:
    given = {"target_batch_size": 64, "optimizer": OPTIMIZERS["sgd"], "reuse_grad_buffers": True, **arguments}
    return alone(model, **given)


def half(model: nn.Module, optimizer: shoal.Optimizer, epoch: int, first: int) -> None:
    """A step with 32 samples."""
    inputs, outputs = fixed_batch(epoch)
    backward(model, inputs[first : first + 32], outputs[first : first + 32], clear=False)
    optimizer.step(batch_size=32)


@pytest.mark.parametrize("factory", [None, shoal.GradientAverager])
def test_a_trainer_that_clears_the_model_in_each_step_is_refused(alone: Alone, factory: Any) -> None:
    """As transformers' does."""
    model, plain = make_model(), make_model()
    optimizer = make(alone, model, grad_averager_factory=factory)
    half(model, optimizer, 0, 0)
    model.zero_grad()
    with pytest.raises(ValueError, match=SAYS):
        half(model, optimizer, 0, 32)
    model.zero_grad()
    assert optimizer.local_epoch == 0
    half(model, optimizer, 0, 0)  # who goes on begins the epoch again
    half(model, optimizer, 0, 32)
    assert optimizer.local_epoch == 1
    backward(plain, *fixed_batch(0))
    fused(OPTIMIZERS["sgd"](plain.parameters())).step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-6, atol=1e-7)


def test_it_is_missed_though_there_is_no_new_gradient(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    half(model, optimizer, 0, 0)
    model.zero_grad()
    with pytest.raises(ValueError, match=SAYS):
        optimizer.step(batch_size=32)


def test_it_is_missed_at_the_end_of_the_epoch(alone: Alone) -> None:
    """The others may have brought the rest, and this peer only asks."""
    model = make_model()
    optimizer = make(alone, model)
    half(model, optimizer, 0, 0)
    model.zero_grad()
    with pytest.raises(ValueError, match=SAYS):
        optimizer._rounds.work.freeze()


def test_between_epochs_they_may_be_cleared(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    for epoch in range(3):
        half(model, optimizer, epoch, 0)
        half(model, optimizer, epoch, 32)
        model.zero_grad()
    assert optimizer.local_epoch == 3


def test_after_gradients_that_were_not_finite_nothing_is_missed(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    half(model, optimizer, 0, 0)
    next(model.parameters()).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]
    # This clears them; the others may have no round for this peer.
    assert not optimizer._rounds.work.freeze()
    optimizer._rounds.work.drop()
    half(model, optimizer, 0, 0)
    half(model, optimizer, 0, 32)
    assert optimizer.local_epoch == 1


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_sums_that_autograd_makes_anew_are_sums(alone: Alone) -> None:
    model, plain = make_model(), make_model()
    optimizer = make(alone, model)
    inputs, outputs = fixed_batch(0)
    for first in (0, 32):
        loss = ((model(inputs[first : first + 32]) - outputs[first : first + 32]) ** 2).mean()
        loss.backward(create_graph=True)
        optimizer.step(batch_size=32)
    assert optimizer.local_epoch == 1
    backward(plain, inputs, outputs)
    fused(OPTIMIZERS["sgd"](plain.parameters())).step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-6, atol=1e-7)
    model.zero_grad()  # gradients with a graph hold their parameters in a cycle


def test_parameters_that_come_to_use_later_are_no_loss(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    first, *rest = model.parameters()
    first.grad = torch.ones_like(first)
    optimizer.step(batch_size=32)
    assert all(parameter.grad is None for parameter in rest)
    half(model, optimizer, 0, 32)
    assert optimizer.local_epoch == 1


def test_an_averager_by_itself_misses_them_too(dht: shoal.DHT) -> None:
    model = make_model()
    averager = shoal.GradientAverager(
        model.parameters(), dht=dht, prefix="cleared", reuse_grad_buffers=True, start=True, min_group_size=1
    )
    missed: tuple[Callable[[], Any], ...] = (averager.step, lambda: averager.accumulate_grads_(64))
    for call in missed:
        backward(model, *fixed_batch(0), clear=False)
        averager.accumulate_grads_(64)
        model.zero_grad()
        with pytest.raises(ValueError, match=r"accumulates in \.grad, and that of parameter 0 was cleared"):
            call()
        assert averager.local_samples_accumulated == 0
    backward(model, *fixed_batch(0), clear=False)
    averager.accumulate_grads_(64)
    averager.step(wait=False).cancel()
    averager.reset_accumulated_grads_()
    model.zero_grad()
    averager.accumulate_grads_(64)
    averager.shutdown()
