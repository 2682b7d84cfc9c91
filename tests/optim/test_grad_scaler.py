"""Mixed precision: `shoal.GradScaler` where gradients stay in `.grad`, and wherever torch's would be used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, fused, make_model

Alone = Callable[..., shoal.Optimizer]
SCALE = 1024.0


def scaler(growth_interval: int = 2) -> shoal.GradScaler:
    return shoal.GradScaler("cpu", init_scale=SCALE, growth_interval=growth_interval)


def scaled_backward(model: nn.Module, by: shoal.GradScaler, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    by.scale(((model(inputs) - outputs) ** 2).mean()).backward()


def test_the_scale_changes_only_after_the_end_of_an_epoch(alone: Alone) -> None:
    model, plain = make_model(), make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], reuse_grad_buffers=True)
    local = OPTIMIZERS["adamw"](plain.parameters())
    by, scales = scaler(), []
    for epoch in range(5):
        inputs, outputs = fixed_batch(epoch)
        for first in (0, 16, 32, 48):
            scaled_backward(model, by, inputs[first : first + 16], outputs[first : first + 16])
            by.unscale_(optimizer)
            if first:
                scaled_part = next(model.parameters()).grad
                assert scaled_part is not None
                assert scaled_part.abs().max() > 10, "unscaled before its time"
            by.step(optimizer, batch_size=16)
            by.update()
        scales.append(by.get_scale())
        backward(plain, inputs, outputs)
        local.step()
        assert optimizer.local_epoch == epoch + 1
        assert all(parameter.grad is None for parameter in model.parameters())
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE, 4 * SCALE], "it grows every second epoch"
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-5)


def test_a_step_that_used_no_gradients_changes_no_scale(alone: Alone) -> None:
    """As after a download, or with batch_size=0: torch's `update` would miss the checks."""
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=True)
    by = scaler(growth_interval=1)
    by.scale(torch.zeros(()))
    by.step(optimizer, batch_size=0)
    by.update()
    assert by.get_scale() == SCALE
    with pytest.raises(AssertionError, match="No inf checks"):
        by.update()
    scaled_backward(model, by, *fixed_batch(0))
    by.step(optimizer, batch_size=64)
    by.update()
    assert by.get_scale() == 2 * SCALE


def test_an_overflow_drops_this_peers_accumulation_only(dht: shoal.DHT) -> None:
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as elsewhere:
        models = [make_model(), make_model()]
        pair = [
            shoal.Optimizer(
                dht=place,
                run_id="overflow",
                target_batch_size=64,
                params=model.parameters(),
                optimizer=OPTIMIZERS["sgd"],
                reuse_grad_buffers=True,
            )
            for place, model in zip((dht, elsewhere), models, strict=True)
        ]
        both = [scaler(), scaler()]
        inputs, outputs = fixed_batch(0)
        for model, optimizer, by in zip(models, pair, both, strict=True):
            scaled_backward(model, by, inputs[:16], outputs[:16])
            by.step(optimizer, batch_size=16)
            by.update()
        scaled_backward(models[0], both[0], inputs[:16] * float("inf"), outputs[:16])
        both[0].step(pair[0], batch_size=16)
        both[0].update()
        assert both[0].get_scale() == SCALE / 2
        assert all(parameter.grad is None for parameter in models[0].parameters())
        assert [one.tracker.local_progress.samples_accumulated for one in pair] == [0, 16]

        def finish(index: int) -> None:
            model, optimizer, by = models[index], pair[index], both[index]
            part = slice(16, 32) if index else slice(32, 64)
            scaled_backward(model, by, inputs[part], outputs[part])
            by.step(optimizer, batch_size=part.stop - part.start)
            by.update()
            while optimizer.local_epoch == 0:
                by.step(optimizer, batch_size=0)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(finish, range(2)))
        plain = make_model()
        backward(plain, inputs, outputs)
        OPTIMIZERS["sgd"](plain.parameters()).step()
        assert torch.equal(flat(models[0]), flat(models[1]))
        torch.testing.assert_close(flat(models[0]), flat(plain), rtol=1e-4, atol=1e-6)
        assert both[1].get_scale() == SCALE
        for optimizer in pair:
            optimizer.shutdown()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, shoal.GradScaler])
def test_without_reuse_it_is_used_as_torchs(alone: Alone, kind: Any) -> None:
    model, plain = make_model(), make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"])
    local = fused(OPTIMIZERS["adamw"](plain.parameters()))
    mine, theirs = (one("cpu", init_scale=SCALE, growth_interval=3) for one in (kind, torch.amp.GradScaler))
    for epoch, factor in enumerate((1.0, float("inf"), 1.0, 1.0, 1.0, 1.0)):
        inputs, outputs = fixed_batch(epoch)
        for net, one, by in ((model, optimizer, mine), (plain, local, theirs)):
            net.zero_grad()
            scaled_backward(net, by, inputs * factor, outputs)
            by.unscale_(one)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            if one is optimizer:
                by.step(one, batch_size=64)
            else:
                by.step(one)
            by.update()
        assert mine.get_scale() == theirs.get_scale()
    assert optimizer.local_epoch == 5
    assert torch.equal(flat(model), flat(plain))  # the same kernels, scaled by powers of two, clipped by the same norm


def test_step_with_grad_scaler(alone: Alone) -> None:
    """The reference's way: the optimizer is given the scaler."""
    model, plain = make_model(), make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"])
    by, local = scaler(), OPTIMIZERS["sgd"](plain.parameters())
    inputs, outputs = fixed_batch(0)
    scaled_backward(model, by, inputs, outputs)
    optimizer.step(batch_size=64, grad_scaler=by)
    backward(plain, inputs, outputs)
    local.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_torchs_own_would_unscale_what_is_held_again_and_is_refused(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=128, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=True)
    theirs = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaled_backward(model, theirs, *fixed_batch(0))
    with pytest.raises(ValueError, match="give a shoal"):
        theirs.step(optimizer, batch_size=64)


NOT_SCALED = r"the loss of these gradients was not scaled: call GradScaler.scale\(loss\) before backward"


@pytest.mark.parametrize("reuse", [False, True])
def test_gradients_of_a_loss_that_was_not_scaled_are_refused_by_every_method(alone: Alone, reuse: bool) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=reuse)
    by, before = scaler(), flat(model)
    backward(model, *fixed_batch(0), clear=False)
    for method in (
        lambda: by.unscale_(optimizer),
        lambda: by.step(optimizer, batch_size=64),
        lambda: optimizer.step(batch_size=64, grad_scaler=by),
        by.update,
        lambda: by.unscale_(torch.optim.SGD(model.parameters())),
    ):
        with pytest.raises(RuntimeError, match=NOT_SCALED):
            method()
    assert optimizer.local_epoch == 0
    assert torch.equal(flat(model), before)
    for parameter in model.parameters():
        parameter.grad = None
    scaled_backward(model, by, *fixed_batch(0))
    by.step(optimizer, batch_size=64)
    by.update()
    assert optimizer.local_epoch == 1


def test_other_optimizers_are_left_to_torch() -> None:
    models = [make_model(), make_model()]
    locals_ = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    both = [scaler(1), torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)]
    for epoch in range(3):
        for model, local, by in zip(models, locals_, both, strict=True):
            local.zero_grad()
            scaled_backward(model, by, *fixed_batch(epoch))
            by.step(local)
            by.update()
    assert both[0].get_scale() == both[1].get_scale() == 8 * SCALE
    assert torch.equal(flat(models[0]), flat(models[1]))  # the same kernels
    half = nn.Linear(2, 1).half()
    stepped = torch.optim.SGD(half.parameters(), lr=0.1)
    both[0].scale(half(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        both[0].unscale_(stepped)


def test_parameters_may_be_float16(alone: Alone) -> None:
    model = nn.Linear(4, 1).half()
    before = flat(model)
    optimizer = alone(
        model,
        target_batch_size=8,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        reuse_grad_buffers=True,
    )
    by = scaler()
    for _ in range(2):
        by.scale(model(torch.ones(4, 4).half()).float().mean()).backward()
        by.step(optimizer, batch_size=4)
        by.update()
    assert optimizer.local_epoch == 1
    assert not torch.equal(flat(model), before)
    torch.testing.assert_close(model.weight.detach().flatten(), before[:4] - 0.1, rtol=0, atol=2e-3)


def test_zero_grad_and_plain_scalers_are_refused_with_reuse(alone: Alone) -> None:
    optimizer = alone(make_model(), target_batch_size=64, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=True)
    with pytest.raises(ValueError, match="reuse_grad_buffers"):
        optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"shoal\.GradScaler"):
        optimizer.step(batch_size=1, grad_scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


def test_switched_off(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], reuse_grad_buffers=True)
    by = shoal.GradScaler("cpu", enabled=False)
    scaled_backward(model, by, *fixed_batch(0))
    by.unscale_(optimizer)
    by.step(optimizer, batch_size=64)
    by.update()
    assert optimizer.local_epoch == 1
