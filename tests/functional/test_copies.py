"""A bound optimizer is copied and pickled with its parameters, and the copy steps as the original does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal.functional as functional


class Counting:
    """Of the recipe's form."""

    def __init__(self, params: list[torch.Tensor], lr: float = 0.1) -> None:
        self.defaults = {"lr": lr}
        self.params = params
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {p: {"step": torch.tensor(3.0)} for p in params}

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.params, gradients, strict=True):
            step = self.state[parameter]["step"].add_(1)
            parameter.sub_(gradient * self.defaults["lr"] / step)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [functional.Adam, functional.SGD, functional.ASGD, Counting])
def test_the_copy_goes_on_by_itself(kind: Any, steps: int, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    bound = functional.bind(kind, list(model.parameters()), lr=0.1)
    gradients = [torch.ones(2, 3), torch.ones(2)]
    for _ in range(steps):
        bound.step(gradients)
    twin, copied = WAYS[way]((model, bound))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        copied.step(gradients)
    assert all(map(torch.equal, before, model.parameters()))
    for _ in range(2):
        bound.step(gradients)
    assert all(map(torch.equal, twin.parameters(), model.parameters()))
    torch.testing.assert_close(copied.state_dict(), bound.state_dict(), rtol=0, atol=0)
    assert not torch.equal(before[0], model.weight)


@pytest.mark.parametrize("wrong", [[1, 2], (1,), "x", {"a": 1}, 1j])
def test_a_state_that_is_none_changes_nothing(wrong: Any) -> None:
    bound = functional.bind(Counting, [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    state = {"state": {0: {"step": 1.0}, 1: {"step": wrong}}, "options": {"lr": 0.5}}
    with pytest.raises(ValueError, match=r"^state 'step' of parameter 1 is .*, expected a tensor or a number"):
        bound.load_state_dict(state)
    state["state"] = {0: {"step": 1.0}, 2: {}}
    with pytest.raises(ValueError, match="has state for parameter 2 of 2"):
        bound.load_state_dict(state)
    state["state"], state["options"] = {0: {"step": 1.0}}, {"speed": 1}
    with pytest.raises(ValueError, match="has no option 'speed'"):
        bound.load_state_dict(state)
    step = {"step": torch.tensor(3.0)}
    assert bound.state_dict() == {"state": {0: step, 1: step}, "options": {"lr": 0.1}}
