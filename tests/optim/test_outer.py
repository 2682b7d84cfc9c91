"""One peer with an outer optimizer, in this process: settings, precision, schedules, checkpoints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.compression import Blockwise4Bit, Float16Compression
from shoal.flat import holders_of
from shoal.integrations.terms import JoinTerms
from shoal.optim import drift
from shoal.optim.drift import Drift, fragments_of, layers_of
from shoal.optim.exact_norm import norm_of
from shoal.optim.kept import Kept
from shoal.optim.pilot import Averaged, Ended
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import AveragingError
from tests.forked import ROOT
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
        ({"inner_steps": 4, "fragments": []}, r"fragments=\[\]"),
        ({"fragments": None}, "fragments=None"),
        ({"fragments": 1.5}, "fragments=1.5"),
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
    anchors = optimizer._state.stepped
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
    drift = optimizer._rounds.work
    assert isinstance(drift, Drift)
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


def test_tied_weights_make_one_layer_whatever_module_is_found_first() -> None:
    tied = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=True))
    tied[2].weight = tied[0].weight  # type: ignore[union-attr]
    parameters = list(tied.parameters())  # the embedding's, two of the layer between, the bias of the last
    holders = holders_of(parameters)
    for found in (holders, holders[::-1]):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(drift, "holders_of", lambda _, found=found: found)
            assert layers_of(parameters) == [[0, 3], [1, 2]]


def test_the_norm_is_exact() -> None:
    tensors = [torch.randn(70001, generator=torch.Generator().manual_seed(0)), torch.zeros(0), torch.ones(1)]
    assert norm_of(tensors) == pytest.approx(float(torch.cat(tensors).double().norm()), rel=1e-12)


# -- what the model has moved is neither lost nor counted twice


def other_state(alone: Alone, epochs: int = 2, **arguments: Any) -> Kept:
    """The state of a run's other peers after so many epochs, as this peer would download it."""
    model = make_model(arguments.pop("seed", 0), arguments.pop("width", 20))
    optimizer = make(alone, model, **arguments)
    number = 100
    while optimizer.local_epoch < epochs:
        step(model, optimizer, number)
        number += 1
    return optimizer._state.exact_copy()


def download(optimizer: shoal.Optimizer, found: Kept) -> bool:
    """`load_state_from_peers`, which finds that state."""
    run = optimizer._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "donors", lambda: [run.dht.peer_id])
        patch.setattr(run, "download", lambda *_, **__: found.as_downloaded(0))
        return optimizer.load_state_from_peers()


def anchor_of(optimizer: shoal.Optimizer) -> torch.Tensor:
    return torch.cat([anchor.detach().reshape(-1) for anchor in optimizer._state.stepped])


@pytest.mark.long
@pytest.mark.parametrize(
    "choice", [{"fragments": 2}, {"mix": 0.5}, {"overlap": 1, "mix": 0.0, "fragments": 2}], ids=["parts", "mix", "late"]
)
def test_a_model_that_is_apart_from_the_anchor_stays_so_where_a_round_was_missed(
    alone: Alone, choice: dict[str, Any]
) -> None:
    """Right after a round, other fragments (or a share of the drift) are in the model and in no round."""
    model, outer = make_model(), shoal.DiLoCo(inner_steps=4, **choice)
    optimizer = make(alone, model, outer=outer)
    number = 0
    while optimizer.local_epoch < 1:
        step(model, optimizer, number)
        number += 1
    drift = flat(model) - anchor_of(optimizer)
    assert drift.abs().max() > 0
    assert download(optimizer, other_state(alone, outer=outer))
    torch.testing.assert_close(flat(model) - anchor_of(optimizer), drift, rtol=1e-4, atol=1e-6)


def test_a_step_without_samples_leaves_the_other_fragments_where_they_are(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=4, fragments=2))
    for number in range(2):
        step(model, optimizer, number)
    drift = optimizer._rounds.work
    assert isinstance(drift, Drift)
    before = flat(model) - anchor_of(optimizer)
    drift.freeze()  # as where the others' round is due
    drift.remember()
    with torch.no_grad():
        for anchor in optimizer._state.stepped:
            anchor.add_(1.0)
    drift.apply(used=False, is_accumulating=False)
    torch.testing.assert_close(flat(model) - anchor_of(optimizer), before, rtol=1e-4, atol=1e-6)


def test_steps_during_a_round_that_took_nothing_of_this_peer_stay(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=4, overlap="free"))
    drift = optimizer._rounds.work
    assert isinstance(drift, Drift)
    optimizer._state.take_over()
    drift.freeze()
    drift.go_on()
    drift.remember()  # in the thread that steps the anchor, before the next inner step
    with torch.no_grad():
        for anchor in optimizer._state.stepped:
            anchor.add_(1.0)
    before = flat(model).clone()
    inputs, outputs = fixed_batch(0)
    ((model(inputs) - outputs) ** 2).mean().backward()
    drift.accumulate(16)
    moved = flat(model) - before
    drift.apply(used=False, is_accumulating=True)
    torch.testing.assert_close(flat(model) - anchor_of(optimizer), moved, rtol=1e-4, atol=1e-6)


def test_a_state_that_does_not_fit_leaves_nothing_behind(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model)
    step(model, optimizer, 0)
    with pytest.raises(AveragingError, match="does not fit"):
        download(optimizer, other_state(alone, width=8))
    for number in range(1, 6):
        step(model, optimizer, number)
    assert optimizer.local_epoch == 1
    drift = flat(model) - anchor_of(optimizer)
    assert download(optimizer, other_state(alone))
    torch.testing.assert_close(flat(model) - anchor_of(optimizer), drift, rtol=1e-4, atol=1e-6)


def test_what_is_in_the_others_state_is_not_brought_again_where_that_can_not_be_had(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of other anchors than this peer's has its drift; the download fails at first."""
    model = make_model()
    optimizer = make(alone, model)
    for number in range(3):
        step(model, optimizer, number)
    mine = PeerID(optimizer._run.me)
    optimizer._epoch._pilot.averaged = Averaged(optimizer._state.tip, None, b"", (mine,))
    elsewhere = Ended(optimizer._state.tip, b"", None, with_state=False, used=True, is_unlike=True, is_alone=False)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._epoch, "_average", lambda _: elsewhere)
        step(model, optimizer, 3)
    assert torch.equal(flat(model), anchor_of(optimizer))
    assert optimizer._epoch._work.samples == 0


def test_a_part_that_may_be_in_a_round_takes_only_its_fragment_along(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, outer = make_model(), shoal.DiLoCo(inner_steps=4, fragments=2)
    optimizer = make(alone, model, outer=outer)
    step(model, optimizer, 0)
    drift, found = optimizer._rounds.work, other_state(alone, outer=outer)
    assert isinstance(drift, Drift)
    drift.freeze()  # for a round of which this peer does not hear the end
    before = flat(model) - anchor_of(optimizer)
    monkeypatch.setattr(optimizer._epoch._pilot, "may_be_in", lambda _: True)
    assert download(optimizer, found)
    after = flat(model) - anchor_of(optimizer)
    sizes = [parameter.numel() for parameter in model.parameters()]
    for number, (was, now) in enumerate(zip(before.split(sizes), after.split(sizes), strict=True)):
        expected = torch.zeros_like(was) if number in drift.fragments[0] else was
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-6)


# -- states of others


@pytest.mark.parametrize("way", ["download", "checkpoint"])
def test_frozen_parameters_are_of_the_state(alone: Alone, way: str) -> None:
    def frozen(seed: int) -> nn.Sequential:
        model = make_model(seed)
        next(model.parameters()).requires_grad_(False)
        return model

    donor, newcomer = frozen(0), frozen(1)
    giver, taker = (make(alone, model, frozen_parameters="send") for model in (donor, newcomer))
    for number in range(4):
        step(donor, giver, number)
    if way == "download":
        assert download(taker, giver._state.exact_copy())
    else:
        newcomer.load_state_dict(donor.state_dict())
        taker.load_state_dict(giver.state_dict())
    assert torch.equal(flat(donor), flat(newcomer))
    assert taker._state.state_digest == giver._state.state_digest


def test_a_lossy_download_is_made_up_for_by_averaging_the_anchors(alone: Alone) -> None:
    exact = make(alone, make_model())
    lossy = make(alone, make_model(), load_state_compression=Float16Compression())
    assert not exact._run.rules.may_average_state(1)
    assert lossy._run.rules.may_average_state(1)


def test_the_plan_of_a_round_counts_the_bytes_that_are_sent(alone: Alone) -> None:
    exact, coded = make(alone, make_model()), make(alone, make_model(), grad_compression=Blockwise4Bit())
    assert exact._run.rules.element_bytes == 4.0
    assert coded._run.rules.element_bytes < 1.0


def test_weights_that_are_written_into_an_offloaded_model_count(alone: Alone) -> None:
    model = make_model()
    optimizer = make(alone, model, offload_optimizer=True)
    for number in range(6):
        step(model, optimizer, number)
    loaded = make_model(3)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), loaded.parameters(), strict=True):
            parameter.copy_(value)
    step(model, optimizer, 6)
    step(loaded, make_sgd(loaded.parameters()), 6)
    torch.testing.assert_close(flat(model), flat(loaded))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["exponential", "cosine", "sequence"])
def test_a_checkpoint_has_the_rate_of_any_scheduler(alone: Alone, kind: str) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        if kind == "exponential":
            return lr_scheduler.ExponentialLR(optimizer, 0.9)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        if kind == "cosine":
            return cosine
        return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer), cosine], [3])

    def rate(optimizer: shoal.Optimizer) -> float:
        return float(optimizer.param_groups[0]["lr"])

    model, other = make_model(), make_model()
    optimizer, again = make(alone, model, scheduler=scheduler), make(alone, other, scheduler=scheduler)
    for number in range(10):
        step(model, optimizer, number)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert rate(again) == pytest.approx(rate(optimizer), rel=1e-12)
    optimizer.load_state_dict(optimizer.state_dict())
    assert rate(again) == pytest.approx(rate(optimizer), rel=1e-12)
    drift = again._rounds.work
    assert isinstance(drift, Drift)
    drift.begin(0)
    drift.begin(2)
    assert rate(again) == pytest.approx(rate(optimizer), rel=1e-12)


def test_residuals_of_other_fragments_are_no_obstacle(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    few = {"grad_compression": Blockwise4Bit(), "error_feedback": 1.0}
    model, other = make_model(), make_model()
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=4, fragments=2), **few)
    again = make(alone, other, outer=shoal.DiLoCo(inner_steps=4), **few)
    for number in range(5):
        step(model, optimizer, number)
    other.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, "shoal"):
        again.load_state_dict(optimizer.state_dict())
    assert "residuals" in caplog.text
    assert again.local_epoch == 2
    for number in range(5, 12):
        step(other, again, number)
    assert again.local_epoch > 2


# -- numbers


def test_an_inner_optimizer_that_has_seen_nan_begins_anew(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    """Adam's averages would stay NaN for ever, and with them every model that it steps."""
    model = make_model()
    optimizer = make(alone, model, optimizer=lambda p: torch.optim.AdamW(p, lr=RATE))
    with caplog.at_level(logging.WARNING, "shoal"):
        for number in range(12):
            inputs, outputs = fixed_batch(number)
            scale = float("nan") if number == 1 else 1.0
            (((model(inputs) - outputs) ** 2).mean() * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("it goes back to the anchor") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.float16])
def test_the_norm_is_of_all_that_is_there_and_leaves_it(dtype: torch.dtype) -> None:
    tensor = torch.full((8,), 3.0, dtype=dtype)
    if dtype.is_complex:
        tensor = tensor + 4j
    before = tensor.clone()
    assert norm_of([tensor]) == pytest.approx(float(torch.linalg.vector_norm(before.to(torch.complex128))), rel=1e-12)
    assert torch.equal(tensor, before)


def test_a_drift_of_float64_is_clipped_like_any_other(alone: Alone) -> None:
    model, alike = make_model().double(), make_model()
    optimizers = [make(alone, each, max_grad_norm=0.01) for each in (model, alike)]
    for number in range(8):
        for each, optimizer in zip((model, alike), optimizers, strict=True):
            inputs, outputs = fixed_batch(number)
            ((each(inputs.to(flat(each).dtype)) - outputs) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(flat(model).float(), flat(alike), rtol=1e-4, atol=1e-6)


def test_a_framework_clips_each_inner_step() -> None:
    terms = JoinTerms(None, "r", 64, {"outer": shoal.DiLoCo()})  # type: ignore[arg-type]
    assert terms.clips_locally


STEPS_ON_ANY_PROCESSOR = """
import random, torch
from blake3 import blake3
from shoal.flat import bytes_of
from shoal.optim.accumulator import factor_of
from shoal.optim.exact_norm import norm_of
from shoal.outer import Nesterov
draw, hasher = random.Random(0), blake3()
sizes = [1, 7, 64, 1000, 4099, 70001]
for dtype in (torch.float32, torch.float64):
    of = lambda size: torch.tensor([draw.gauss(0, 1) for _ in range(size)], dtype=dtype)
    anchors = [torch.nn.Parameter(of(size)) for size in sizes]
    outer = Nesterov(lr=0.7)(anchors)
    for _ in range(3):
        drifts = [of(size) for size in sizes]
        torch._foreach_mul_(drifts, factor_of(norm_of(drifts), 0.3))
        for anchor, drift in zip(anchors, drifts):
            anchor.grad = drift
        outer.step()
    for anchor in anchors:
        hasher.update(bytes_of(anchor.detach()))
print(hasher.hexdigest())
"""


def test_clipped_steps_of_the_anchor_have_the_same_bits_with_other_instructions() -> None:
    def run(capability: str) -> str:
        environment = os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
        command = [sys.executable, "-c", STEPS_ON_ANY_PROCESSOR]
        return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout

    assert len({run(capability) for capability in ("", "default", "avx2")}) == 1
