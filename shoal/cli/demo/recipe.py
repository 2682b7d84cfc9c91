"""How the demo's model is trained: batch sizes, optimizer and schedule, chosen for 4 peers on 2 cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

TARGET_BATCH_SIZE = 128
BATCH_SIZE_PER_STEP = 16
HELD_OUT_WINDOWS = 128
SAMPLE_CHARACTERS = 500
_PEAK_LEARNING_RATE = 6e-3
_WARM_UP_EPOCHS = 8
_LAST_FACTOR = 0.05


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW; a short memory of squares suits a run of few, small steps."""
    return torch.optim.AdamW(parameters, lr=_PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)


def scheduler_factory(epochs: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Linear warm-up, then a cosine to a twentieth of the peak at the last of ``epochs``."""

    def factor(epoch: int) -> float:
        warm_up = (epoch + 1) / min(_WARM_UP_EPOCHS, epochs)
        cosine = (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2
        return min(warm_up, _LAST_FACTOR + (1 - _LAST_FACTOR) * cosine)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
