"""Checkpoints: of the flat optimizer, and translated to and from those of ordinary optimizers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import shoal
from shoal.flat import ContiguousParams
from tests.counting import Counting
from tests.flat.test_contiguous_missing_gradients import four_layers, some_layers
from tests.flat.twins import Twins, small_model
from tests.old_checkpoints import CLASSES, FORMS, assert_close, go_on, old_checkpoint, torchs

CASES = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.NAdam, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adagrad, {}),
]


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        for item, other in zip(ours, theirs, strict=True):
            assert_same(item, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize(("optimizer", "options"), CASES)
def test_the_translated_state_dict_is_that_of_the_plain_optimizer(
    optimizer: type[optim.Optimizer], options: dict[str, float]
) -> None:
    options = {"foreach": False} | options if "fused" not in options else options
    twins = Twins(optimizer, make=four_layers, **options)
    for seed, used in enumerate([(0, 1, 2, 3), (0, 3), (0, 1, 3)]):
        twins.backward(seed, some_layers(*used))
        twins.step()
        twins.zero_grad()
    ours = twins.parameters.original_state_dict(twins.flat_optimizer)
    theirs = twins.plain_optimizer.state_dict()
    if "fused" in options:
        assert ours["param_groups"] == theirs["param_groups"]
        assert all(torch.allclose(ours["state"][0][name], theirs["state"][0][name]) for name in ours["state"][0])
    else:
        assert_same(ours, theirs)


@pytest.mark.parametrize(("optimizer", "options"), CASES)
def test_a_checkpoint_made_without_shoal_is_gone_on_with(
    optimizer: type[optim.Optimizer], options: dict[str, float]
) -> None:
    options = {name: value for name, value in options.items() if name != "fused"} | {"foreach": False}
    model = four_layers()
    plain = optimizer(model.parameters(), **options)
    for seed, used in enumerate([(0, 1, 2, 3), (0, 3), (0, 1, 3)]):
        torch.manual_seed(seed)
        some_layers(*used)(model, torch.randn(2, 5)).square().sum().backward()
        plain.step()
        plain.zero_grad()
    twins = Twins(optimizer, make=four_layers, **options)
    checkpoint, weights = saved(plain.state_dict()), saved(model.state_dict())
    for each in (twins.plain, twins.flat):
        each.load_state_dict(weights)
    twins.plain_optimizer.load_state_dict(checkpoint)
    twins.parameters.load_original_state_dict(twins.flat_optimizer, checkpoint)
    assert_same(twins.parameters.original_state_dict(twins.flat_optimizer), plain.state_dict())
    for seed, used in enumerate([(0, 1, 2, 3), (2,), (0, 1, 2, 3)]):
        twins.backward(seed, some_layers(*used))
        twins.step()
        twins.assert_equal()
        twins.zero_grad()


def test_the_plain_optimizer_loads_the_translation() -> None:
    twins = Twins(optim.Adam)
    twins.train(3)
    twins.plain.load_state_dict(twins.flat.state_dict())
    twins.plain_optimizer = optim.Adam(twins.plain.parameters(), foreach=False)
    twins.plain_optimizer.load_state_dict(saved(twins.parameters.original_state_dict(twins.flat_optimizer)))
    assert twins.plain_optimizer.param_groups[0]["fused"] is None
    twins.train(3, first=3)
    assert twins.distance() < 1e-6


def test_the_translation_has_memory_of_its_own() -> None:
    twins = Twins(optim.Adam)
    twins.train(1)
    before = twins.parameters.original_state_dict(twins.flat_optimizer)
    copied = saved(before)
    twins.train(2, first=1)
    assert_same(before, copied)
    assert before["state"][0]["exp_avg"].untyped_storage().nbytes() == 35 * 4


def test_mixed_dtypes_groups_and_numbers_without_dimensions() -> None:
    def make() -> list[nn.Parameter]:
        torch.manual_seed(0)
        shapes = [
            ((3,), torch.float32),
            ((), torch.float32),
            ((2, 2), torch.float64),
            ((4,), torch.float32),
            ((), torch.float64),
        ]
        return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in shapes]

    plain, flat = make(), make()
    parameters = ContiguousParams([{"params": flat[:3], "lr": 0.1}, {"params": flat[3:]}])
    theirs = optim.Adam([{"params": plain[:3], "lr": 0.1}, {"params": plain[3:]}], foreach=False)
    ours = optim.Adam(parameters.contiguous(), foreach=False)
    for items, optimizer in ((plain, theirs), (flat, ours)):
        for _ in range(2):
            torch.stack([(item * item).sum().double() for item in items]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(parameters.original_state_dict(ours), theirs.state_dict())
    fresh = optim.Adam(parameters.contiguous(), foreach=False)
    parameters.load_original_state_dict(fresh, theirs.state_dict())
    assert_same(parameters.original_state_dict(fresh), theirs.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.1
    assert [len(group["params"]) for group in fresh.param_groups] == [2, 2], "equal steps need no split"


def test_channels_last_state() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        return model

    plain, flat = make(), make()
    parameters = ContiguousParams(flat)
    theirs, ours = (
        optim.Adam(plain.parameters(), foreach=False),
        optim.Adam(parameters.contiguous(), foreach=False),
    )
    x = torch.randn(2, 3, 6, 6)
    for model, optimizer in ((plain, theirs), (flat, ours)):
        model(x).square().sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.grad.copy_(other.grad)
        optimizer.step()
    assert_same(parameters.original_state_dict(ours), theirs.state_dict())
    parameters.load_original_state_dict(ours, theirs.state_dict())
    assert_same(parameters.original_state_dict(ours), theirs.state_dict())


def test_its_own_state_dict_round_trip() -> None:
    twins = Twins(optim.Adam, foreach=False)
    twins.train(3)
    checkpoint, weights = saved(twins.flat_optimizer.state_dict()), saved(twins.flat.state_dict())
    model = small_model()
    parameters = ContiguousParams(model)
    optimizer = optim.Adam(parameters.contiguous(), foreach=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(checkpoint)
    twins.flat, twins.parameters, twins.flat_optimizer = model, parameters, optimizer
    twins.train(3, first=3)
    twins.assert_equal()


def test_a_state_dict_of_other_parameters_is_refused() -> None:
    twins = Twins(optim.Adam)
    other = optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, but the optimizer has groups of \[4\]"):
        twins.parameters.load_original_state_dict(twins.flat_optimizer, other.state_dict())


def test_state_of_other_shapes_is_refused() -> None:
    twins = Twins(optim.Adam)
    twins.train(1)
    checkpoint = twins.plain_optimizer.state_dict()
    before = twins.parameters.original_state_dict(twins.flat_optimizer)
    checkpoint["state"][2]["exp_avg"] = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="'exp_avg'"):
        twins.parameters.load_original_state_dict(twins.flat_optimizer, checkpoint)
    assert_same(twins.parameters.original_state_dict(twins.flat_optimizer), before)


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_flat_state_of_other_runs_is_refused_before_a_kernel_writes_beyond_it(fused: bool | None, steps: int) -> None:
    """torch loads it, and with its fused kernel corrupts the heap."""

    def one(numel: int) -> tuple[nn.Parameter, optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(numel))
        return parameter, optim.Adam(ContiguousParams([parameter]).contiguous(), fused=fused)

    def train(parameter: nn.Parameter, optimizer: optim.Optimizer) -> None:
        parameter.sum().backward()
        optimizer.step()

    other = one(16)
    train(*other)
    parameter, optimizer = one(4096)
    for _ in range(steps):
        train(parameter, optimizer)
    before = parameter.clone()
    optimizer.load_state_dict(saved(other[1].state_dict()))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'exp_avg' has shape \(16,\), .* load_original_state_dict"):
            train(parameter, optimizer)
    assert torch.equal(parameter, before)


def test_lbfgs_is_not_translated() -> None:
    twins = Twins(optim.LBFGS)
    with pytest.raises(ValueError, match="LBFGS"):
        twins.parameters.original_state_dict(twins.flat_optimizer)


def test_momentum_of_sparse_gradients_that_was_saved_without_shoal_is_loaded() -> None:
    """torch's momentum buffer of an embedding is sparse then."""
    ends = []
    for flat in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(7, 3, sparse=True)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.tensor([1, 4])).square().sum().backward()
        plain.step()
        optimizer = plain
        if flat:
            parameters = ContiguousParams(model)
            optimizer = torch.optim.SGD(parameters.contiguous(), lr=0.1, momentum=0.9)
            parameters.load_original_state_dict(optimizer, plain.state_dict())
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(
    ("kind", "form"), [(kind, "number") for kind in CLASSES] + [(optim.NAdam, form) for form in FORMS]
)
def test_what_an_older_torch_has_saved_is_loaded(kind: type[optim.Optimizer], form: str) -> None:
    """A parameter of one element has state of the shape that its numbers have there."""
    values, state = old_checkpoint(kind, form)
    params = [nn.Parameter(value.clone()) for value in values]
    parameters = ContiguousParams(params)
    optimizer = kind(parameters.contiguous(), **CLASSES[kind])
    parameters.load_original_state_dict(optimizer, state)
    parameters.load_original_state_dict(optimizer, parameters.original_state_dict(optimizer))
    go_on(params, optimizer.step)
    assert_close(params, torchs(kind, values, state))


@pytest.mark.parametrize("number", [np.float32, np.int64, np.float64], ids=lambda number: number.__name__)
def test_a_step_that_is_a_number_of_numpy_is_loaded(number: Any) -> None:
    """torch makes a tensor of it."""
    torch.manual_seed(0)
    twins = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    flat = ContiguousParams(twins[:2])
    ours, plain = optim.AdamW(flat.contiguous()), optim.AdamW(twins[2:])
    for twin in twins:
        twin.grad = torch.full_like(twin, 0.5)
    plain.step()
    saved = plain.state_dict()
    for state in saved["state"].values():
        state["step"] = number(3)
    plain.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(twins[:2], twins[2:], strict=True):
            mine.copy_(theirs)
    flat.load_original_state_dict(ours, saved)
    assert len(flat.contiguous()) == 1
    for optimizer in (ours, plain):
        optimizer.step()
    assert_close(twins[:2], twins[2:])
    assert float(flat.original_state_dict(ours)["state"][1]["step"]) == 4


def together(params: list[Tensor]) -> shoal.Together:
    return shoal.Together(Counting(params[:1], lr=0.1), optim.AdamW(params[1:], foreach=False))


@pytest.mark.filterwarnings("ignore:Counting is not known to be element-wise")
@pytest.mark.parametrize("make", [lambda params: Counting(params, lr=0.1), together], ids=["alone", "together"])
def test_state_of_no_parameter_goes_both_ways(make: Any) -> None:
    def trained(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
        for number in range(3):
            model.zero_grad()
            model[0](torch.full((4, 6), 1.0 + number)).square().mean().backward()
            if number:  # the second layer has a gradient in some steps only
                model[1](torch.full((4, 8), 1.0)).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def model_of(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(layer.parameters())} for layer in model.children()]

    plain, ours, later = model_of(), model_of(), model_of()
    optimizer = make(groups(plain))
    contiguous = ContiguousParams(groups(ours))
    flat = make(contiguous.contiguous())
    assert torch.equal(trained(ours, flat), trained(plain, optimizer))
    state = saved(contiguous.original_state_dict(flat))
    assert_same(state["state"], optimizer.state_dict()["state"])
    assert any(key in state["state"] for key in ("k", (0, "k")))
    later.load_state_dict(ours.state_dict())
    fresh = ContiguousParams(groups(later))
    again = make(fresh.contiguous())
    fresh.load_original_state_dict(again, state)
    expected = trained(plain, optimizer)
    assert torch.equal(trained(later, again), expected)
    assert torch.equal(trained(ours, flat), expected)
