"""Optimizers that need whole tensors are refused, and unknown ones are warned of."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn, optim

from shoal.flat import ContiguousParams
from shoal.flat.elementwise import _COMPARED


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


def test_subclasses_of_what_is_element_wise_are_too() -> None:
    for unknown in (type("MyAdam", (optim.AdamW,), {}), type("Lion", (Unknown,), {}), OwnOptions):
        with pytest.warns(UserWarning, match=rf"{unknown.__name__} is not known to be element-wise"):
            step(unknown)


class Compared(optim.Optimizer):
    """Stands in for a class that was compared, by its package and name."""

    def __init__(self, params, **options):
        self.maximize, self.clip, self.rectify = True, 1.0, options.pop("rectify", False)
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "use_gc": False, **options})

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # as pytorch_optimizer's classes count


LION = {"__module__": "pytorch_optimizer.optimizer.lion", "__qualname__": "Lion"}


def test_classes_that_were_compared_are_not() -> None:
    lion = type("Lion", (Compared,), LION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(lion)
        step(type("QHM", (Compared,), {"__module__": "pytorch_optimizer.x", "__qualname__": "QHM"}))


@pytest.mark.parametrize(
    "option", [{"use_gc": True}, {"cautious": True}, {"adanorm": torch.tensor(0.0)}, {"rectify": True}], ids=str
)
def test_their_options_that_look_at_whole_tensors_are(option) -> None:
    lion = type("Lion", (Compared,), LION)
    ((name, value),) = option.items()
    said = rf"Lion with {name}={re.escape(str(value))} is not known to be element-wise.*warnings.filterwarnings"
    with pytest.warns(UserWarning, match=said):
        step(lambda params: lion(params, **option))


def test_the_same_name_in_another_package_is() -> None:
    with pytest.warns(UserWarning, match="Lion is not known to be element-wise"):
        step(type("Lion", (Compared,), {"__module__": "my.lion", "__qualname__": "Lion"}))


@pytest.mark.long
def test_numbers_of_the_real_classes_on_flat_memory() -> None:
    package = pytest.importorskip("pytorch_optimizer", reason="not in the tests' environment: `make optimizers` has it")
    names = [name for of, name in _COMPARED if of == "pytorch_optimizer"]
    for kind in (getattr(package, name) for name in names):
        models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        given = [models[0].parameters(), ContiguousParams(models[1]).contiguous()]
        for model, params in zip(models, given, strict=True):
            optimizer = kind(params, lr=0.01)
            for number in range(5):
                model.zero_grad()
                model(torch.full((4, 6), 1.0 + number).double()).square().mean().backward()
                optimizer.step()
        for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)  # in float64: rounding


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch) -> None:
    """Each test hears the warnings that are given once."""
    monkeypatch.setattr("shoal.flat.elementwise._told", set())
