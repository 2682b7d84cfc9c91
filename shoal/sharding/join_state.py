"""What makes no collectives in an iteration, and yet must not stay behind in a `Join`: schedulers, gradient scalers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from shoal.sharding.join_optimizer import first_of
from shoal.sharding.options import numbers_of, with_numbers

Stepped = LRScheduler | GradScaler
"""What a loop steps for every batch. What it counts are numbers of its state dict; the rest is equal on all ranks."""


def hand_over(
    stepped: Sequence[Stepped], group: dist.ProcessGroup | None, device: torch.device, *, was_last: bool
) -> None:
    """When all have joined: all take the counts of the first rank that joined last. All ranks call it."""
    leader = first_of(was_last, group, device)
    for each in stepped:
        state = each.state_dict()
        numbers = numbers_of(state).to(device)
        dist.broadcast(numbers, group=group, group_src=leader)
        if not was_last:
            each.load_state_dict(with_numbers(state, numbers))
