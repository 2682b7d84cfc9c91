"""A parameter without a gradient is left alone, as torch.optim leaves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from shoal.flat import ContiguousParams, flat_parameter, grad_of
from tests.flat.twins import Twins


def four_layers() -> Any:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5), nn.Linear(5, 3)])


def some_layers(*used: int):
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        outputs = [model[index](x if model[index].in_features == 5 else torch.cat([x, x[:, :2]], 1)) for index in used]
        return torch.cat(outputs, 1)

    return forward


CASES = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 3}),
    (optim.Rprop, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), CASES)
def test_unused_layers_are_skipped_and_have_step_counts_of_their_own(
    optimizer: type[optim.Optimizer], options: dict[str, float]
) -> None:
    twins = Twins(optimizer, make=four_layers, **options, foreach=False)
    for seed, used in enumerate([(0, 1, 2, 3), (0, 3), (0, 1, 3), (2,), (0, 1, 2, 3), (1,), (0, 1, 2, 3)]):
        twins.backward(seed, some_layers(*used))
        twins.step()
        twins.assert_equal()
        twins.zero_grad()
    assert len(twins.parameters.contiguous()) == 4


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flat_parameters_stand_anywhere_in_a_group(place: int) -> None:
    others = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    flat = ContiguousParams(ours).contiguous()
    optimizer = optim.SGD([*others[:place], *flat, *others[place:]], lr=0.1, weight_decay=0.5)
    torch.cat([*others, ours[1]]).sum().backward()
    optimizer.step()
    assert torch.equal(ours[0], torch.ones(3))
    for parameter in (*others, ours[1]):
        torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.85))


def test_first_gradients_after_others_with_momentum() -> None:
    twins = Twins(optim.SGD, make=four_layers, lr=0.1, momentum=0.9, dampening=0.1)
    for seed, used in enumerate([(0, 3), (0, 1, 2, 3), (0, 3), (0, 1, 2, 3)]):
        twins.backward(seed, some_layers(*used))
        twins.step()
        twins.zero_grad()
        assert twins.flat_optimizer.param_groups[0]["fused"] is (None if seed == 1 else True)
    assert twins.distance() < 1e-6


def test_with_the_fused_kernel_too() -> None:
    twins = Twins(optim.AdamW, make=four_layers, weight_decay=0.5)
    for seed, used in enumerate([(0, 1, 2, 3), (0, 3), (0, 1, 3), (2,), (0, 1, 2, 3)]):
        twins.backward(seed, some_layers(*used))
        twins.step()
        twins.zero_grad()
    assert twins.distance() < 1e-6


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,)])
def test_frozen_layers_do_not_move_and_can_be_trained_later(frozen: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        model = four_layers()
        for index in frozen:
            model[index].requires_grad_(False)
        return model

    twins = Twins(optim.AdamW, make=make, weight_decay=0.5, foreach=False)
    assert [parameter.requires_grad for parameter in twins.flat.parameters()] == [
        parameter.requires_grad for parameter in make().parameters()
    ]
    for seed in range(6):
        if seed == 3:
            for model, _ in twins.both:
                model.requires_grad_(True)
        twins.backward(seed, some_layers(0, 1, 2, 3))
        twins.step()
        twins.assert_equal()
        twins.zero_grad()
        if seed == 2:
            for index in frozen:
                assert torch.equal(twins.flat[index].weight, four_layers()[index].weight)


def test_layers_frozen_in_between() -> None:
    twins = Twins(optim.Adam, make=four_layers, weight_decay=0.5, foreach=False)
    for seed in range(6):
        for model, _ in twins.both:
            model[1].requires_grad_(seed not in (2, 3))
        twins.backward(seed, some_layers(0, 1, 2, 3))
        twins.step()
        twins.assert_equal()
        twins.zero_grad()


def test_a_gradient_that_is_dropped_after_backward() -> None:
    twins = Twins(optim.Adam, make=four_layers, weight_decay=0.5, foreach=False)
    for seed in range(3):
        twins.backward(seed, some_layers(0, 1, 2, 3))
        for model, _ in twins.both:
            model[seed].bias.grad = None
        twins.step()
        twins.assert_equal()
        twins.zero_grad()


def test_what_is_left_of_an_older_gradient_is_not_used() -> None:
    twins = Twins(optim.Adam, make=four_layers, weight_decay=0.5, foreach=False)
    twins.backward(0, some_layers(0, 1, 2, 3))
    twins.zero_grad()
    twins.backward(1, some_layers(0, 3))
    ours = clip_grad_norm_(twins.parameters.contiguous(), 1e9)
    theirs = clip_grad_norm_(twins.plain.parameters(), 1e9)
    assert torch.isclose(ours, theirs)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(twins.flat_optimizer)
    assert all(
        (parameter.grad is None) == (index in (1, 2))
        for index, layer in enumerate(twins.flat)
        for parameter in layer.parameters()
    )


@pytest.mark.filterwarnings("ignore:.*is not known to be element-wise")
def test_a_step_that_failed_is_not_remembered() -> None:
    class Fails(optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    model = four_layers()
    parameters = ContiguousParams(model)
    optimizer = Fails(parameters.contiguous(), lr=0.1)
    some_layers(0, 1, 2, 3)(model, torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    model.zero_grad()
    some_layers(0)(model, torch.ones(2, 5)).sum().backward()
    norm = clip_grad_norm_(parameters.contiguous(), 1e9)
    assert torch.isclose(norm, clip_grad_norm_(model[0].parameters(), 1e9))


def test_nothing_has_a_gradient() -> None:
    twins = Twins(optim.AdamW, weight_decay=0.5)
    twins.step()
    twins.assert_equal()
    assert twins.parameters.contiguous()[0].grad is None
    assert len(twins.parameters.contiguous()) == 1


def test_runs_stay_whole_while_all_have_gradients() -> None:
    twins = Twins(optim.Adam, make=four_layers)
    (run,) = twins.parameters.contiguous()
    for seed in range(3):
        twins.backward(seed, some_layers(0, 1, 2, 3))
        twins.step()
        twins.zero_grad()
    assert twins.flat_optimizer.param_groups[0]["params"] == [run]


def test_two_optimizers_of_the_same_memory() -> None:
    twins = Twins(optim.Adam, make=four_layers, foreach=False, weight_decay=0.1)
    options = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    others = optim.SGD(twins.plain.parameters(), **options), optim.SGD(twins.parameters.contiguous(), **options)
    for seed, used in enumerate([(0, 1, 2, 3), (0, 3), (0, 1, 3), (2,), (0, 1, 2, 3)]):
        twins.backward(seed, some_layers(*used))
        if seed % 2:
            twins.step()
        for optimizer in others:
            optimizer.step()
        twins.assert_equal()
        twins.zero_grad()


@pytest.mark.filterwarnings("ignore:.*is not known to be element-wise")
def test_state_that_cannot_be_split_is_said() -> None:
    class Odd(optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["histogram"] = torch.zeros(3)
            return super().step(closure)

    model = four_layers()
    optimizer = Odd(ContiguousParams(model).contiguous(), lr=0.1)
    some_layers(0, 1, 2, 3)(model, torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    some_layers(0)(model, torch.ones(2, 5)).sum().backward()
    with pytest.raises(ValueError, match="'histogram' is neither one number nor one number per element"):
        optimizer.step()


def test_lbfgs_takes_zeros_for_them() -> None:
    twins = Twins(optim.LBFGS, make=four_layers, lr=0.05, max_iter=5)
    forward = some_layers(0, 3)
    for model, optimizer in twins.both:

        def closure(model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (forward(model, torch.ones(2, 5)) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert len(twins.parameters.contiguous()) == 1
    assert twins.distance() < 1e-4


def test_it_costs_one_look_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(optim.Adam)
    twins.train(2)
    looks: list[Tensor] = []

    def counted(parameter: Tensor) -> Any:
        looks.append(parameter)
        return grad_of(parameter)

    monkeypatch.setattr(flat_parameter, "grad_of", counted)
    twins.backward(5)
    twins.flat_optimizer.step()
    assert len(looks) == len(list(twins.flat.parameters()))
