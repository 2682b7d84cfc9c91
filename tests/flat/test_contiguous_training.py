"""Training on flat memory is training. What is equal to the bit is so for the reasons that `twins` gives."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from shoal.flat import ContiguousParams
from tests.flat.twins import Twins, small_model

OPTIMIZERS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    (optim.AdamW, {"maximize": True}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    (optim.Adagrad, {"lr_decay": 0.01}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 2}),
]


def test_the_loop_of_the_reference_trains_on() -> None:
    plain, flat = small_model(), small_model()
    parameters = ContiguousParams(flat.parameters())
    optimizers = optim.Adam(plain.parameters(), fused=True), optim.Adam(parameters.contiguous())
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model, optimizer, trained in zip(
            (plain, flat), optimizers, (list(plain.parameters()), parameters.contiguous()), strict=True
        ):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            model(x).sum().backward()
            clip_grad_norm_(trained, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert not any(map(torch.equal, before, model.parameters())), "a parameter did not move"
        parameters.assert_buffer_is_valid()
    for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_every_optimizer_is_bit_equal_with_the_same_kernel(
    optimizer: type[optim.Optimizer], options: dict[str, float], foreach: bool
) -> None:
    twins = Twins(optimizer, **options, foreach=foreach)
    start = small_model()
    twins.train(20)
    twins.assert_equal()
    assert not torch.equal(twins.flat[0].weight, start[0].weight)


@pytest.mark.parametrize(
    ("optimizer", "options"), [case for case in OPTIMIZERS if "fused" in signature(case[0]).parameters]
)
def test_the_kernel_that_is_picked_rounds_differently_at_most(
    optimizer: type[optim.Optimizer], options: dict[str, float]
) -> None:
    twins = Twins(optimizer, **options)
    twins.train(20)
    assert twins.flat_optimizer.param_groups[0]["fused"] is True
    assert twins.plain_optimizer.param_groups[0]["fused"] is None
    assert twins.distance() < 1e-6


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": False}, {"foreach": True}])
def test_a_kernel_that_was_asked_for_is_kept(options: dict[str, bool]) -> None:
    twins = Twins(optim.SGD, lr=0.1, **options)
    twins.train(1)
    assert not twins.flat_optimizer.param_groups[0]["fused"]


def test_options_that_are_tensors_are_left_to_other_kernels() -> None:
    twins = Twins(optim.Adam, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=False, lr=0.1)
    twins.train(3)
    twins.assert_equal()


def test_state_that_was_made_without_the_fused_kernel_goes_on_with_it() -> None:
    twins = Twins(optim.Adam, foreach=False)
    twins.train(3)
    fresh = optim.Adam(twins.parameters.contiguous())
    fresh.load_state_dict(twins.flat_optimizer.state_dict())
    fresh.param_groups[0]["foreach"] = None
    twins.flat_optimizer = fresh
    twins.train(3, first=3)
    assert fresh.param_groups[0]["fused"]
    assert twins.distance() < 1e-6


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["module", "optimizer"])
def test_zero_grad_and_accumulation(set_to_none: bool, by: str) -> None:
    twins = Twins(optim.SGD, lr=0.01, momentum=0.9, foreach=False)
    for seed in range(6):
        twins.backward(seed)
        twins.backward(seed + 100)
        twins.assert_equal()
        assert all(run.grad is not None for run in twins.parameters.contiguous())
        assert all(parameter.grad is view for parameter, view in views_of(twins.parameters))
        twins.step()
        for model, optimizer in twins.both:
            (model if by == "module" else optimizer).zero_grad(set_to_none=set_to_none)
        assert all((parameter.grad is None) == set_to_none for parameter in twins.flat.parameters())
        twins.assert_equal()


def views_of(parameters: ContiguousParams) -> list[tuple[nn.Parameter, Tensor]]:
    return [(member.parameter, member.view) for run in parameters.contiguous() for member in run.members]


def test_gradients_are_views_of_the_flat_gradient() -> None:
    model = small_model()
    run: Any
    (run,) = ContiguousParams(model.parameters()).contiguous()
    assert run.grad is None
    model(torch.randn(2, 5)).sum().backward()
    flat: Any = run.grad
    assert flat.shape == run.shape
    flat.fill_(3.0)
    assert all((parameter.grad == 3).all() for parameter in model.parameters())


def test_gradients_that_were_there_before_are_kept() -> None:
    plain, flat = small_model(), small_model()
    for model in (plain, flat):
        model(torch.ones(2, 5)).sum().backward()
    parameters = ContiguousParams(flat.parameters())
    for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert parameters.contiguous()[0].grad is not None


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_and_its_closure(line_search: str | None) -> None:
    twins = Twins(optim.LBFGS, lr=0.05, max_iter=8, line_search_fn=line_search)
    torch.manual_seed(1)
    x = torch.randn(16, 5)
    for _ in range(2):
        losses: list[Any] = []
        for model, optimizer in twins.both:

            def closure(model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> Any:
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                return loss.detach()

            losses.append(optimizer.step(closure))
        assert torch.isclose(losses[0], losses[1], rtol=1e-3)
    assert losses[0] < 0.3
    assert twins.distance() < 0.01


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_closure_makes_the_gradients_of_its_step(as_keyword: bool) -> None:
    twins = Twins(optim.Adam, foreach=False, weight_decay=0.1)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model, optimizer in twins.both:

            def closure(
                model: nn.Module = model, optimizer: optim.Optimizer = optimizer, x: Tensor = x, seed: int = seed
            ) -> float:
                optimizer.zero_grad()
                layers = model if seed % 2 else model[:2]  # the last layer without gradients in every other step
                loss = layers(x).square().sum()
                loss.backward()
                return loss.item()

            optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        twins.assert_equal()


def test_grad_scaler_and_autocast() -> None:
    twins = Twins(optim.Adam, foreach=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for (model, optimizer), scaler in zip(twins.both, scalers, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().sum()
            scaler.scale(loss * (float("inf") if seed == 3 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        twins.assert_equal()
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_grad_scaler_scales_inside_the_fused_kernel() -> None:
    twins = Twins(optim.Adam, fused=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model, optimizer in twins.both:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert twins.distance() < 1e-6


def test_one_batch_of_nan_is_forgotten() -> None:
    model = small_model()
    parameters = ContiguousParams(model.parameters())
    optimizer = optim.SGD(parameters.contiguous(), lr=0.1)
    for value in (float("nan"), 1.0):
        optimizer.zero_grad()
        model(torch.full((2, 5), value)).sum().backward()
        norm = clip_grad_norm_(parameters.contiguous(), 1.0)
    assert torch.isfinite(norm)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in parameters.contiguous())


def test_norms_and_clipping_are_those_of_the_parameters() -> None:
    twins = Twins(optim.SGD)
    twins.backward(0)
    ours = clip_grad_norm_(twins.parameters.contiguous(), 0.1)
    assert torch.isclose(ours, clip_grad_norm_(twins.plain.parameters(), 0.1))
    for flat, plain in zip(twins.flat.parameters(), twins.plain.parameters(), strict=True):
        assert torch.allclose(flat.grad, plain.grad, rtol=1e-6)


def test_groups_keep_their_options() -> None:
    plain, flat = small_model(), small_model()
    groups = [
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": list(model[2].parameters()), "weight_decay": 0.1}]
        for model in (plain, flat)
    ]
    parameters = ContiguousParams(groups[1])
    assert [group.keys() for group in parameters.contiguous()] == [{"params", "lr"}, {"params", "weight_decay"}]
    assert [len(group["params"]) for group in parameters.contiguous()] == [1, 1]
    assert [len(group["params"]) for group in parameters.original()] == [2, 2]
    ours = optim.SGD(parameters.contiguous(), lr=0.1, foreach=False)
    groups[0][0]["params"] = plain[0].parameters()
    theirs = optim.SGD(groups[0], lr=0.1, foreach=False)
    for model, optimizer in ((plain, theirs), (flat, ours)):
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, flat.parameters(), plain.parameters()))


def test_sparse_gradients_become_dense() -> None:
    plain, flat = nn.Embedding(10, 3), nn.Embedding(10, 3, sparse=True)
    flat.load_state_dict(plain.state_dict())
    parameters = ContiguousParams(flat)
    optimizers = (
        optim.SGD(plain.parameters(), lr=0.1, foreach=False),
        optim.SGD(parameters.contiguous(), lr=0.1, foreach=False),
    )
    for model, optimizer in zip((plain, flat), optimizers, strict=True):
        for _ in range(2):
            model(torch.tensor([1, 5, 5])).sum().backward()
        optimizer.step()
    parameters.assert_buffer_is_valid()
    assert torch.equal(plain.weight, flat.weight)  # sums of ones: no rounding before the step


def test_a_gradient_that_was_set_by_hand_is_used() -> None:
    model = small_model()
    parameters = ContiguousParams(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.SGD(parameters.contiguous(), lr=1.0).step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old - 1)  # the step rounds once: 1.0 times 1.0 is exact
    parameters.assert_buffer_is_valid()


def _gradient(parameter: Any) -> Any:
    return parameter.grad


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph() -> None:
    twins = Twins(optim.SGD, lr=0.1, foreach=False)
    for model, optimizer in twins.both:
        model(torch.ones(2, 5)).square().sum().backward(create_graph=True)
        penalty = torch.stack([view.square().sum() for view in map(_gradient, model.parameters())]).sum()
        gradients = torch.autograd.grad(penalty, list(model.parameters()))
        assert any(gradient.abs().sum() > 0 for gradient in gradients)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, twins.flat.parameters(), twins.plain.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_half_precision(optimizer: type[optim.Optimizer], options: dict[str, float], dtype: torch.dtype) -> None:
    twins = Twins(optimizer, make=lambda: small_model().to(dtype), **options)
    for seed in range(5):
        twins.backward(seed, lambda model, x: model(x.to(dtype)))
        twins.step()
        twins.zero_grad()
    assert (twins.flat[0].weight != small_model()[0].weight.to(dtype)).any()
    for ours, theirs in zip(twins.flat.parameters(), twins.plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
