"""Optimizers that differentiate gradients: refused in Shoal's words where gradients are averages, and at home where
each peer steps with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from tests.optim.conftest import Alone
from tests.optim.models import fixed_batch, flat, make_model


class Curved(torch.optim.Optimizer):
    """Divides by the diagonal of the Hessian, as it is along ones."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [parameter.grad for parameter in parameters]
            ones = [torch.ones_like(gradient) for gradient in gradients]
            curvatures = torch.autograd.grad(gradients, parameters, ones, retain_graph=True)
            for parameter, gradient, curvature in zip(parameters, gradients, curvatures, strict=True):
                parameter.sub_(gradient.detach() / (1 + curvature.abs()), alpha=group["lr"])


def step(model: torch.nn.Module, optimizer: Any, epoch: int) -> None:
    inputs, outputs = fixed_batch(epoch)
    (model(inputs) - outputs).square().mean().backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_it_is_refused_in_words_and_nothing_has_changed(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=8, batch_size_per_step=8, optimizer=Curved)
    before = flat(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Curved differentiates the gradients .*Train with outer=shoal\.DiLoCo"):
            step(model, optimizer, 0)
        assert torch.equal(flat(model), before)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_with_outer_it_steps_as_by_itself(alone: Alone) -> None:
    model, plain = make_model(), make_model()
    optimizer = alone(model, batch_size_per_step=8, optimizer=Curved, outer=shoal.DiLoCo(inner_steps=5))
    by_itself = Curved(plain.parameters())
    for epoch in range(4):
        step(model, optimizer, epoch)
        step(plain, by_itself, epoch)
    assert torch.equal(flat(model), flat(plain))  # the same kernels on the same numbers
