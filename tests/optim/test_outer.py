"""One peer with an outer optimizer, in this process: settings, precision, schedules, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.drift import fragments_of
from shoal.optim.exact_norm import norm_of
from tests.optim.models import fixed_batch, flat, make_model

Alone = Callable[..., shoal.Optimizer]
RATE = 0.01


def make_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def make(alone: Alone, model: nn.Module, **arguments: Any) -> shoal.Optimizer:
    given = {"optimizer": make_sgd, "batch_size_per_step": 16, "outer": shoal.DiLoCo(inner_steps=4), **arguments}
    return alone(model, **given)


def step(model: nn.Module, optimizer: Any, number: int, **arguments: Any) -> None:
    inputs, outputs = fixed_batch(number)
    loss = ((model(inputs.to(flat(model).dtype)) - outputs) ** 2).mean()
    loss.backward()
    optimizer.step(**arguments)
    optimizer.zero_grad()


def reference(steps: int, inner_steps: int, rule: dict[str, Any], max_norm: float | None = None) -> torch.Tensor:
    """The parameters after so many steps of one replica, with torch's optimizers."""
    model, anchor = make_model(), make_model()
    inner, outer = make_sgd(model.parameters()), torch.optim.SGD(anchor.parameters(), **rule)
    for number in range(steps):
        step(model, inner, number)
        if (number + 1) % inner_steps == 0:
            for kept, moved in zip(anchor.parameters(), model.parameters(), strict=True):
                kept.grad = kept.detach() - moved.detach()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(anchor.parameters(), max_norm)
            outer.step()
            model.load_state_dict(anchor.state_dict())
    return flat(model)


@pytest.mark.parametrize(
    ("outer", "rule"),
    [
        (shoal.outer.Nesterov(), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (shoal.outer.SGD(lr=0.5), {"lr": 0.5}),
        (lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5), {"lr": 0.7, "momentum": 0.5}),
    ],
    ids=["nesterov", "sgd", "torch"],
)
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("offload", [False, True])
def test_the_model_is_that_of_torch(
    alone: Alone, outer: Any, rule: dict[str, Any], max_norm: float | None, offload: bool
) -> None:
    model = make_model()
    choice = shoal.DiLoCo(inner_steps=4, optimizer=outer)
    optimizer = make(alone, model, outer=choice, max_grad_norm=max_norm, offload_optimizer=offload)
    for number in range(20):
        step(model, optimizer, number)
    assert optimizer.local_epoch == 5
    torch.testing.assert_close(flat(model), reference(20, 4, rule, max_norm), rtol=1e-5, atol=1e-6)


def test_the_target_may_be_samples(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model, outer=shoal.DiLoCo(), target_batch_size=64)
    for number in range(8):
        step(model, optimizer, number)
    assert optimizer.local_epoch == 2
    rule = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    torch.testing.assert_close(flat(model), reference(8, 4, rule), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"outer": None}, "give target_batch_size=…: it says when an epoch ends"),
        ({"outer": shoal.DiLoCo()}, r"give target_batch_size=…, or DiLoCo\(inner_steps=…\)"),
        ({"target_batch_size": 64}, r"target_batch_size=64 and DiLoCo\(inner_steps=4\) both say"),
        ({"outer": "DiLoCo"}, "outer='DiLoCo': give a shoal.DiLoCo"),
        ({"use_local_updates": True}, "use_local_updates=True steps at once, and leaves no use for outer"),
        ({"reuse_grad_buffers": True}, "averages no gradients, and leaves no use for reuse_grad_buffers"),
        (
            {"delay_optimizer_step": True, "offload_optimizer": True},
            r"no use for delay_optimizer_step; DiLoCo\(overlap=…\) hides the round",
        ),
        ({"grad_averager_factory": shoal.GradientAverager}, "no use for grad_averager_factory"),
        ({"average_opt_statistics": ["exp_avg"]}, "no use for average_opt_statistics"),
        ({"outer": shoal.DiLoCo(inner_steps=4, fragments=4)}, "the model has 3 layers with trained parameters"),
        ({"outer": shoal.DiLoCo(inner_steps=4, optimizer=lambda p: p)}, "made list, which is not a torch.optim.Opt"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused_by_name(
    alone: Alone, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make(alone, make_model(), **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"inner_steps": 0}, "inner_steps=0.*give a whole number, at least 1"),
        ({"inner_steps": 7, "fragments": 2}, "which is not whole here: choose a multiple"),
        ({"fragments": 0}, "fragments=0"),
        ({"overlap": "soon"}, "overlap='soon'"),
        ({"overlap": 1}, "counts inner steps, and the epoch ends at target_batch_size"),
        ({"inner_steps": 4, "overlap": 4}, "an epoch has 4 inner steps"),
        ({"mix": 1.5}, "mix=1.5"),
        ({"mix": "lose"}, "mix='lose'"),
        ({"optimizer": make_sgd([nn.Parameter(torch.zeros(1))])}, "give shoal.outer.Nesterov"),
    ],
)
def test_choices_that_make_no_sense_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shoal.DiLoCo(**given)


@pytest.mark.parametrize("given", [{"lr": 0.0}, {"lr": "fast"}, {"momentum": 1.0}, {"lr": float("nan")}])
def test_rates_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"shoal\.outer\.Nesterov"):
        shoal.outer.Nesterov(**given)


def test_a_model_of_few_bits_has_an_anchor_of_float32(alone: Alone) -> None:
    """What the inner steps do in bfloat16 adds up in the anchor, where one of them would round to nothing."""
    model = make_model().bfloat16()
    before = flat(model).float()
    optimizer = make(
        alone, model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-9),
        outer=shoal.DiLoCo(inner_steps=2, optimizer=shoal.outer.SGD(lr=1e-3)),
    )  # fmt: skip
    anchors = optimizer._replica.stepped
    assert all(anchor.dtype is torch.float32 for anchor in anchors)
    step(model, optimizer, 0)  # before its first step, other weights are a new beginning
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0078125)
    step(model, optimizer, 1)
    moved = torch.cat([anchor.detach().reshape(-1) for anchor in anchors]) - before
    assert optimizer.local_epoch == 1
    assert moved.abs().max() > 0
    assert torch.equal(flat(model).float(), before), "in bfloat16 that is too little to be seen"


@pytest.mark.parametrize("inner_steps", [None, 4])
def test_the_scheduler_follows_the_runs_inner_progress(alone: Alone, inner_steps: int | None) -> None:
    model = make_model()
    given = {} if inner_steps else {"target_batch_size": 64}
    optimizer = make(
        alone, model, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        outer=shoal.DiLoCo(inner_steps=inner_steps), **given,
    )  # fmt: skip
    for number in range(10):
        made = number if inner_steps else number // 4
        assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / (1 + made))
        step(model, optimizer, number)
    drift = optimizer._epoch._drift
    assert drift is not None
    drift.begin(50)  # as after a download
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / (1 + (50 * 4 + 2 if inner_steps else 50)))
    drift.begin(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATE / (1 + (4 + 2 if inner_steps else 1)))


def test_a_checkpoint_goes_on_bit_for_bit_in_the_middle_of_an_epoch(alone: Alone) -> None:
    def made(model: nn.Module) -> shoal.Optimizer:
        return make(
            alone, model, optimizer=lambda p: torch.optim.AdamW(p, lr=RATE),
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        )  # fmt: skip

    model, other = make_model(), make_model(1)
    optimizer = made(model)
    for number in range(10):
        step(model, optimizer, number)
    saved, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    again = made(other)
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    assert again.local_epoch == 2
    for number in range(10, 20):
        step(model, optimizer, number)
        step(other, again, number)
        assert torch.equal(flat(model), flat(other))
    assert again.local_epoch == optimizer.local_epoch == 5


def test_a_loss_that_overflows_makes_no_inner_step(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    scaler = shoal.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    made = 0
    for number in range(6):
        inputs, outputs = fixed_batch(number)
        scaler.scale(((model(inputs) - outputs) ** 2).mean()).backward()
        if number == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        before = flat(model).clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        made += not torch.equal(before, flat(model))
    assert made == 5
    assert optimizer.local_epoch == 1
    assert scaler.get_scale() == 2.0**9


def test_a_model_that_is_not_finite_goes_back_to_the_anchor(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = make(alone, model)
    for number in range(3):
        step(model, optimizer, number)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING, "shoal"):
        step(model, optimizer, 3)
    assert "it goes back to the anchor" in caplog.text
    assert flat(model).isfinite().all()


def test_fragments_have_every_layer_once() -> None:
    model = make_model()
    parameters = list(model.parameters())
    dealt = fragments_of(2, parameters)
    assert dealt == [[0, 1, 4, 5], [2, 3]]
    assert fragments_of([[parameters[5], parameters[0]], parameters[1:5]], parameters) == [[5, 0], [1, 2, 3, 4]]
    for wrong in ([parameters[:3]], [parameters, parameters[:1]], [parameters, []], [[torch.zeros(1)], parameters]):
        with pytest.raises(ValueError, match="each of the 6 trained parameters"):
            fragments_of(wrong, parameters)


def test_the_norm_is_exact() -> None:
    tensors = [torch.randn(70001, generator=torch.Generator().manual_seed(0)), torch.zeros(0), torch.ones(1)]
    assert norm_of(tensors) == pytest.approx(float(torch.cat(tensors).double().norm()), rel=1e-12)
