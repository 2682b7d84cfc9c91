"""What torch's `DistributedDataParallel` does not do by itself in a `Join`."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.sharding._torch import divides_by_all_ranks, set_divisor


def divide_by_live(model: DistributedDataParallel, work: dist.Work | None) -> None:
    """Lets `model` divide by the number of live ranks in its next backward pass, if its join hook was told to.

    Args:
        model: of a `Join`; of all of these torch's own heartbeat tells only the first.
        work: the heartbeat, whose result is that number.
    """
    if work is not None:
        set_divisor(model, work, all_ranks=divides_by_all_ranks(model))


def divide_by_all_ranks(model: DistributedDataParallel, work: dist.Work) -> None:
    """After a `Join`, let `model` divide by the number of ranks again, and not by the last count of live ones.

    Args:
        model: which got its count from heartbeats.
        work: any that is done; `model` must have one, and does not look at it.
    """
    set_divisor(model, work, all_ranks=True)
