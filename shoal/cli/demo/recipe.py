"""How the demo's model is trained: batch sizes, optimizer and schedule, chosen for 4 peers on 2 cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor, optim

TARGET_BATCH_SIZE = 128
BATCH_SIZE_PER_STEP = 16
HELD_OUT_WINDOWS = 128
SAMPLE_CHARACTERS = 500


def make_optimizer(parameters: Iterable[Tensor]) -> optim.Optimizer:
    """AdamW; a short memory of squares suits a run of few, small steps."""
    return optim.AdamW(parameters, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.05)


def scheduler_factory(epochs: int) -> Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]:
    """Linear warm-up in 8 epochs, then a cosine to a twentieth of the peak at the last of ``epochs``."""

    def factor(epoch: int) -> float:
        cosine = (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2
        return min((epoch + 1) / min(8, epochs), 0.05 + (1 - 0.05) * cosine)

    return lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, factor)
