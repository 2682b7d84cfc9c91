"""What the tests train: small models, fixed batches, and the same training in one process with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal

BATCH = 64
"""Samples of a fixed batch; also the target batch size of most tests."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None] = {
    "none": None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 9], gamma=0.5),
}

OUTSIDE: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "none": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    "each step": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step)),
    "each epoch": lambda optimizer: shoal.EpochScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)),
}
"""Schedulers that a framework makes of the `shoal.Optimizer`, and steps after each batch."""


def fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same, with the kernel that `shoal.Optimizer` picks on the host: then their steps are bit-equal."""
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


def make_model(seed: int = 0, width: int = 20) -> nn.Sequential:
    """10 inputs, 1 output."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def fixed_batch(epoch: int) -> tuple[Tensor, Tensor]:
    """The inputs and outputs of an epoch, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + epoch)
    inputs = torch.randn(BATCH, 10, generator=generator)
    return inputs, inputs[:, :3].prod(1, keepdim=True)


def backward(model: nn.Module, inputs: Tensor, outputs: Tensor, *, clear: bool = True) -> Tensor:
    """The gradients of the mean loss, in `.grad` (added to what is there, if that is not to be cleared); returns the
    loss."""
    if clear:
        model.zero_grad()
    loss = ((model(inputs) - outputs) ** 2).mean()
    loss.backward()
    return loss.detach()


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_alone(optimizer: str, scheduler: str, epochs: int, width: int = 20) -> Tensor:
    """The parameters after `epochs` fixed batches with nothing but torch, in one process."""
    model = make_model(width=width)
    local = OPTIMIZERS[optimizer](model.parameters())
    make_scheduler = SCHEDULERS[scheduler]
    schedule = make_scheduler(local) if make_scheduler is not None else None
    for epoch in range(epochs):
        backward(model, *fixed_batch(epoch))
        local.step()
        if schedule is not None:
            schedule.step()
    return flat(model)
