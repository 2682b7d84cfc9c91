"""Checkpoints as older versions of torch have saved them, and the training that goes on from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

CLASSES: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"lr": 0.05, "momentum": 0.9, "dampening": 0.5},
    optim.Adam: {"lr": 0.05, "amsgrad": True},
    optim.AdamW: {"lr": 0.05},
    optim.Adamax: {"lr": 0.05},
    optim.NAdam: {"lr": 0.05},
    optim.RAdam: {"lr": 0.05},
    optim.Adagrad: {"lr": 0.05},
    optim.Adadelta: {"lr": 0.5},
    optim.RMSprop: {"lr": 0.01, "momentum": 0.9, "centered": True},
    optim.Rprop: {"lr": 0.01},
    optim.ASGD: {"lr": 0.05, "t0": 2, "lambd": 0.1},
}
NUMBERS = ("step", "eta", "mu", "mu_product")
NEW_OPTIONS = ("foreach", "maximize", "capturable", "fused", "differentiable", "decoupled_weight_decay")

FORMS: dict[str, Callable[[float], Any]] = {
    "number": lambda value: int(value) if value.is_integer() else value,  # torch before 1.12
    "float": lambda value: value,
    "one element": lambda value: torch.tensor([value]),
    "0-dim": torch.tensor,
    "other dtype": lambda value: torch.tensor(value, dtype=torch.int64 if value.is_integer() else torch.float64),
}

SHAPES = ((3, 4), (5,), (1,), (17,))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params: Sequence[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param, shape in zip(params, SHAPES, strict=True):
        param.grad = torch.randn(shape, generator=generator)


def go_on(params: Sequence[Tensor], step: Callable[[], object]) -> None:
    for number in range(5, 8):
        set_gradients(params, number)
        step()


def old_checkpoint(kind: type[optim.Optimizer], form: str) -> tuple[list[Tensor], dict[str, Any]]:
    """The parameters after 5 steps, and the optimizer's state dict: its numbers in that form, without newer options."""
    params = parameters()
    optimizer = kind(params, **CLASSES[kind])
    for number in range(5):
        set_gradients(params, number)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held.update({name: FORMS[form](held[name].item()) for name in NUMBERS if name in held})
    for group in state["param_groups"]:
        for name in NEW_OPTIONS:
            group.pop(name, None)
    return [param.detach().clone() for param in params], state


def torchs(kind: type[optim.Optimizer], values: Sequence[Tensor], state: dict[str, Any], **given: Any) -> list[Tensor]:
    """The parameters with which torch's own optimizer ends."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind(params, **CLASSES[kind], **given)
    optimizer.load_state_dict(copy.deepcopy(state))
    go_on(params, optimizer.step)
    return [param.detach() for param in params]


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Another kernel rounds each element of each of the few steps differently: some units in the last place."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=1e-6)
