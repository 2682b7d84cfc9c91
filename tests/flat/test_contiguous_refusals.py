"""Optimizers that need whole tensors are refused, and unknown ones are warned of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn, optim

from shoal.flat import ContiguousParams


def step(optimizer_class: type[optim.Optimizer], **options: float) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = optimizer_class(ContiguousParams([weight]).contiguous(), **options)
    weight.sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "name", ["LAMB", "Lamb", "LARS", "Shampoo", "DistributedShampoo", "SOAP", "NovoGrad", "Adam_mini"]
)
def test_known_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} needs whole tensors: it .*\. Give it original\(\)"):
        step(type(name, (optim.Adam,), {}))


@pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.SparseAdam])
def test_of_torch(optimizer_class: type[optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"needs whole tensors: it .*\. Give it original\(\)"):
        step(optimizer_class)


def test_muon_is_refused_when_it_is_made() -> None:
    weights = ContiguousParams([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ValueError, match=r"Muon needs whole tensors: it orthogonalises .*\. Give it original\(\)"):
        optim.Muon(weights.contiguous())
    optim.Muon(weights.original())


def test_lazy_modules_that_have_not_run() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"parameter 0 '0.weight' has no shape yet .* run the model on a batch"):
        ContiguousParams(model)
    model(torch.ones(1, 3))
    ContiguousParams(model)


def test_it_is_refused_at_every_step() -> None:
    optimizer_class = type("Lamb", (optim.Adam,), {})
    for _ in range(2):
        with pytest.raises(ValueError, match="norm of each layer"):
            step(optimizer_class)


def test_subclasses_of_what_needs_whole_tensors() -> None:
    with pytest.raises(ValueError, match="Mine needs whole tensors"):
        step(type("Mine", (type("LAMB", (optim.Adam,), {}),), {}))


class Unknown(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


class OwnOptions(optim.SGD):
    def __init__(self, params):
        optim.Optimizer.__init__(self, params, {})  # no "fused", no "momentum"

    step = Unknown.step


def test_unknown_classes_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"Unknown is not known to be element-wise.*original\(\)"):
        step(Unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Unknown)


def test_subclasses_of_what_is_element_wise_and_known_names_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(type("MyAdam", (optim.AdamW,), {}))
        step(type("Lion", (Unknown,), {}))
        step(OwnOptions)
