"""Brings schedulers and gradient scalers up to date after a `Join`. They make no collectives, so no hook shadows
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from shoal.sharding.join_optimizer import first_of
from shoal.sharding.option_numbers import numbers_of, take_numbers, with_numbers

Stepped = LRScheduler | GradScaler
"""An object that a loop steps for every batch. Its counts are numbers in its state dict; the rest is equal on all
ranks.
"""


def hand_over(
    stepped: Sequence[Stepped], group: dist.ProcessGroup | None, device: torch.device, *, was_last: bool
) -> None:
    """After all ranks have joined: all take the counts of the first rank that joined last. All ranks call this.

    They also take the options of the optimizers that schedulers step, because a scheduler goes on from the rate that it
    finds there. `Join` may not know such an optimizer, for example one that every rank has whole.

    Raises:
        ValueError: on all ranks, if a rank's state holds more or fewer numbers than the leader's.
    """
    leader = first_of(was_last, group, device)
    for each in stepped:
        state = each.state_dict()
        groups = each.optimizer.param_groups if isinstance(each, LRScheduler) else []
        options = numbers_of(groups)
        numbers = torch.cat([options, numbers_of(state)]).to(device)
        size = torch.tensor([numbers.numel()], device=device)
        dist.broadcast(size, group=group, group_src=leader)
        other = first_of(numbers.numel() != int(size), group, device)
        if other is not None:
            raise ValueError(
                f"the state of {type(each).__name__} holds more or fewer numbers on rank {other} than on rank "
                f"{leader}: Join can set a scheduler's counts, but not lists that grow"
            )
        dist.broadcast(numbers, group=group, group_src=leader)
        if not was_last:
            taken = numbers.cpu()
            take_numbers(groups, taken[: options.numel()])
            each.load_state_dict(with_numbers(state, taken[options.numel() :]))
