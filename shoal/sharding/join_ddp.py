"""The divisor of gradients in a `Join`, which torch's `DistributedDataParallel` does not always set by itself."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.sharding._torch import divides_by_all_ranks, set_divisor


def divide_by_live(model: DistributedDataParallel, work: dist.Work | None) -> None:
    """Makes `model` divide by the number of live ranks in its next backward pass, if its join hook was told to.

    Args:
        model: a model of a `Join`. torch's own heartbeat tells only the first one.
        work: the heartbeat, whose result is the number of live ranks; None if none was sent.
    """
    if work is not None:
        set_divisor(model, work, all_ranks=divides_by_all_ranks(model))


def divide_by_all_ranks(model: DistributedDataParallel, work: dist.Work) -> None:
    """After a `Join`, makes `model` divide by the number of all ranks again, and not by the last number of live ranks.

    Args:
        model: a model that got its divisor from heartbeats.
        work: any finished work. `model` needs one, and does not read its result.
    """
    set_divisor(model, work, all_ranks=True)
