"""State that an older torch has saved loads into functional optimizers, and goes on with torch's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shoal.functional import BoundOptimizer, bind, functional_optim_map
from tests.old_checkpoints import CLASSES, FORMS, assert_close, go_on, old_checkpoint, torchs


def entry_of(state: dict[str, Any]) -> dict[str, Any]:
    """The same in the form of a bound optimizer."""
    return {
        "state": state["state"],
        "options": {name: value for name, value in state["param_groups"][0].items() if name != "params"},
    }


def step(bound: BoundOptimizer) -> None:
    bound.step([param.grad for param in bound.params])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CLASSES)
def test_it_goes_on_as_torch_does(kind: type[optim.Optimizer], form: str) -> None:
    values, state = old_checkpoint(kind, form)
    before = copy.deepcopy(state)
    params = [nn.Parameter(value.clone()) for value in values]
    bound = bind(functional_optim_map[kind], params, **CLASSES[kind])
    bound.load_state_dict(entry_of(state))
    go_on(params, lambda: step(bound))
    assert_close(params, torchs(kind, values, state))
    assert repr(state) == repr(before), "what was given has changed"


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_with_every_kernel(kernel: dict[str, bool]) -> None:
    values, state = old_checkpoint(optim.Adam, "number")
    params = [nn.Parameter(value.clone()) for value in values]
    bound = bind(functional_optim_map[optim.Adam], params, **CLASSES[optim.Adam], **kernel)
    bound.load_state_dict(entry_of(state))
    go_on(params, lambda: step(bound))
    assert_close(params, torchs(optim.Adam, values, state, **kernel))


@pytest.mark.parametrize("wrong", ["three", [3], torch.ones(2)])
def test_what_is_no_number_is_refused_and_nothing_has_changed(wrong: Any) -> None:
    values, state = old_checkpoint(optim.NAdam, "number")
    bound = bind(functional_optim_map[optim.NAdam], [nn.Parameter(value) for value in values], lr=0.1)
    state["state"][1]["mu_product"] = wrong
    with pytest.raises(ValueError, match=r"state 'mu_product' of parameter 1 (is|has shape) .*, expected \[\]"):
        bound.load_state_dict(entry_of(state))
    assert bound.options["lr"] == 0.1
    assert bound.state_dict()["state"][0]["step"] == 0


def test_a_number_where_a_tensor_belongs_is_refused() -> None:
    values, state = old_checkpoint(optim.Adam, "0-dim")
    bound = bind(functional_optim_map[optim.Adam], [nn.Parameter(value) for value in values])
    state["state"][0]["exp_avg"] = 1.0
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 is 1.0, expected \[3, 4\]"):
        bound.load_state_dict(entry_of(state))


class Recipe:
    """In the form of PyTorch's recipe: its state is tensors."""

    def __init__(self, params: list[Tensor], lr: float = 0.1) -> None:
        self.params, self.defaults = params, {"lr": lr}
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self, gradients: list[Tensor | None]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            if gradient is not None:
                held = self.state.setdefault(param, {"step": torch.tensor(0.0)})
                held["step"].add_(1)
                param.sub_(gradient / held["step"])


@pytest.mark.parametrize("form", FORMS)
def test_a_recipe_gets_tensors(form: str) -> None:
    param = torch.ones(1)
    bound = bind(Recipe, [param])
    bound.load_state_dict({"state": {0: {"step": FORMS[form](3.0), "momentum_buffer": None}}, "options": {}})
    bound.step([torch.ones(1)])
    assert param.item() == 0.75
