"""Registering functional optimizers of both forms, and using them in the same way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.functional import (
    ASGD,
    QHM,
    SGD,
    Adam,
    BoundOptimizer,
    FunctionalOptimizer,
    NAdam,
    RMSprop,
    Rprop,
    bind,
    functional_optim_map,
    register_functional_optim,
    register_functional_optimizer,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def _forms() -> dict[str, type]:
    from tests.functional.recipe_qhm import FunctionalQHM

    class Eager(FunctionalQHM):
        """Only the class itself is known to TorchScript: this one is plain Python."""

    class Compiled(FunctionalQHM):
        step = torch.compile(FunctionalQHM.step, backend="eager")

    return {"shoal": QHM, "scripted": FunctionalQHM, "eager": Eager, "compiled": Compiled}


forms = pytest.mark.parametrize("form", ["shoal", "scripted", "eager", "compiled"])


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(functional_optim_map)
    yield
    functional_optim_map.clear()
    functional_optim_map.update(before)


class Key:
    """Stands for a user's optimizer class."""


def _make(form: str) -> tuple[BoundOptimizer, list[Tensor]]:
    register_functional_optimizer(Key, _forms()[form])
    params = [torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.float64)]
    return bind(functional_optim_map[Key], params, 0.1, momentum=0.9, nu=0.7, weight_decay=0.01), params


def _grads(step: int) -> list[Tensor | None]:
    return [
        torch.full((3,), 1.0 + step),
        None if step == 1 else torch.full((2,), -1.0 - step, dtype=torch.float64),
    ]


@forms
def test_every_form_gives_the_numbers_of_qhm(form: str) -> None:
    bound, params = _make(form)
    expected = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    functional = QHM(0.1, 0.9, 0.7, 0.01)
    state = functional.init(expected)
    for step in range(5):
        bound.step(_grads(step))
        functional.step(expected, _grads(step), state)
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=1e-6, atol=1e-6)


@forms
def test_every_form_goes_on_from_a_state_dict(form: str) -> None:
    bound, params = _make(form)
    bound.step(_grads(0))
    saved = bound.state_dict()
    assert set(saved["state"]) == {0, 1}
    assert saved["options"]["lr"] == 0.1
    resumed, others = _make(form)
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    resumed.options = {"lr": 5.0}
    resumed.load_state_dict(saved)
    for step in range(1, 4):
        bound.step(_grads(step))
        resumed.step(_grads(step))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)  # the same operations on copies of the same parameters and state
    with pytest.raises(ValueError, match="state for parameter 7 of 2"):
        resumed.load_state_dict({"state": {7: saved["state"][0]}, "options": {}})


@forms
def test_every_form_takes_new_options(form: str) -> None:
    bound, params = _make(form)
    bound.step(_grads(0))
    bound.options = {"lr": 0.0}
    assert bound.options["lr"] == 0.0
    assert bound.options["nu"] == 0.7
    before = [param.detach().clone() for param in params]
    bound.step(_grads(1))
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
    assert bound.state_dict()["state"][0]["momentum_buffer"][0] > 0.2  # both gradients are in it
    with pytest.raises(ValueError, match="no option 'learning_rate'"):
        bound.options = {"learning_rate": 1.0}


@forms
def test_every_form_wants_one_gradient_per_parameter(form: str) -> None:
    with pytest.raises(ValueError, match="one gradient, or None, per parameter: got"):
        _make(form)[0].step([None])


def test_a_scripted_class_runs_as_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, params = _make("scripted")

    def python(self: Any, gradients: Any) -> None:
        raise AssertionError("ran in Python")

    monkeypatch.setattr(_forms()["scripted"], "step", python)
    bound.step(_grads(0))
    assert params[0][0] < 1


def test_the_map_is_filled_with_torch_optim_and_can_be_written_as_the_recipe_does() -> None:
    assert shoal.functional_optim_map is functional_optim_map
    assert functional_optim_map[torch.optim.Adam] is Adam
    assert functional_optim_map[shoal.QHM] is QHM
    assert len(functional_optim_map) == 12
    assert all(optimizer.element_wise for optimizer in functional_optim_map.values())  # type: ignore[attr-defined]
    recipe = _forms()["eager"]
    functional_optim_map[Key] = recipe
    assert functional_optim_map[Key] is recipe


def test_the_last_registration_counts_and_with_torchs_name_the_first() -> None:
    register_functional_optimizer("key", QHM)
    register_functional_optimizer("key", Adam)
    assert functional_optim_map["key"] is Adam
    register_functional_optim("key", SGD)
    register_functional_optim("another", SGD)
    assert functional_optim_map["key"] is Adam
    assert functional_optim_map["another"] is SGD


class NoStep:
    def __init__(self, params: list[Tensor]) -> None: ...


class NoParams:
    def __init__(self) -> None: ...
    def step(self, gradients: list[Tensor | None]) -> None: ...


class NoGradients:
    def __init__(self, params: list[Tensor]) -> None: ...
    def step(self) -> None: ...


class TooMuch:
    def __init__(self, params: list[Tensor]) -> None: ...
    def step(self, gradients: list[Tensor | None], lr: float) -> None: ...


class Unfinished(FunctionalOptimizer):
    element_wise = True


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NoStep, r"NoStep is neither a FunctionalOptimizer nor .* it has no method step\(gradients\)"),
        (NoParams, "__init__ takes no argument but self"),
        (NoGradients, "step takes no argument but self"),
        (TooMuch, "step needs lr besides the gradients"),
        (torch.optim.Adam, r"Optimizer, which finds gradients in \.grad"),
        (Unfinished, "Unfinished leaves _layout, _update of FunctionalOptimizer open"),
        (Adam(1e-3), "registered as a class, got Adam"),
        ("Adam", "registered as a class, got 'Adam'"),
    ],
)
def test_wrong_forms_are_refused(wrong: Any, message: str) -> None:
    for register in (register_functional_optimizer, register_functional_optim, functional_optim_map.__setitem__):
        with pytest.raises(TypeError, match=message):
            register(Key, wrong)
    assert Key not in functional_optim_map


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.ASGD, torch.optim.Rprop])
def test_a_state_dict_of_torch_optim_is_taken_over(optimizer: Any) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5} if optimizer is torch.optim.SGD else {"lr": 0.1}
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(20))
    reference = optimizer([theirs], **options, foreach=False)
    grads = torch.randn(6, 20)
    for grad in grads[:3]:
        theirs.grad = grad.clone()
        reference.step()
    ours = theirs.detach().clone()
    bound = bind(functional_optim_map[optimizer], [ours], **options, foreach=False)
    bound.load_state_dict({"state": reference.state_dict()["state"], "options": {}})
    for grad in grads[3:]:
        theirs.grad = grad.clone()
        reference.step()
        bound.step([grad])
    assert torch.equal(ours, theirs)  # torch's loop and ours, on one tensor of the same shape


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_torch_goes_on_from_its_state_where_a_first_gradient_is_still_to_come(dampening: float, fused: bool) -> None:
    """torch would dampen it, had the parameter a buffer of zeros already."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
    ours = [torch.zeros(5), torch.zeros(5)]
    bound = bind(SGD, ours, **options, fused=fused)
    bound.step([torch.ones(5), None])
    theirs = [torch.nn.Parameter(param.clone()) for param in ours]
    reference = torch.optim.SGD(theirs, **options, foreach=False)
    checkpoint = copy.deepcopy(bound.state_dict()["state"])
    reference.load_state_dict({**reference.state_dict(), "state": checkpoint})
    bound.load_state_dict({"state": checkpoint, "options": {}})
    for _ in range(2):
        for param in theirs:
            param.grad = torch.ones(5)
        reference.step()
        bound.step([torch.ones(5), torch.ones(5)])
    torch.testing.assert_close(ours, [param.detach() for param in theirs])


def test_a_gradient_of_another_device_is_refused_before_the_kernel() -> None:
    bound = bind(Adam, [torch.ones(3)])
    with pytest.raises(ValueError, match=r"a gradient is of torch.float32 on meta, but its parameter of .* on cpu"):
        bound.step([torch.ones(3, device="meta")])
    assert bound.state_dict()["state"][0]["step"] == 0


def test_states_that_do_not_fit_change_nothing() -> None:
    bound = bind(Adam, [torch.ones(3)])
    bound.step([torch.ones(3)])
    good = bound.state_dict()["state"][0]
    for entry, message in (
        ({"exp_avg": good["exp_avg"]}, r"is \['exp_avg'\], but Adam with these options has \['exp_avg', 'exp_avg_sq'"),
        ({**good, "exp_avg": torch.ones(4)}, r"'exp_avg' of parameter 0 has shape \[4\], expected \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            bound.load_state_dict({"state": {0: entry}, "options": {"lr": 0.5}})
    assert bound.options["lr"] == 1e-3
    assert bound.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("make", [Adam, NAdam, Rprop, ASGD, RMSprop])
def test_a_new_learning_rate_or_kernel_keeps_the_state(make: type) -> None:
    bound = bind(make, [torch.ones(3)], 0.1)
    bound.step([torch.ones(3)])
    before = {name: value.clone() for name, value in bound.state_dict()["state"][0].items()}
    bound.options = {"lr": 0.2, "foreach": False}
    assert {name: value.tolist() for name, value in bound.state_dict()["state"][0].items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_options_that_need_another_state_are_refused() -> None:
    bound = bind(SGD, [torch.ones(3)], 0.1)
    with pytest.raises(ValueError, match=r"the state would be \['momentum_buffer'\] in place of \[\]: bind a new"):
        bound.options = {"momentum": 0.9}
    with pytest.raises(ValueError, match="lr is at least 0"):
        bound.options = {"lr": -1.0}
    assert bound.options["lr"] == 0.1
