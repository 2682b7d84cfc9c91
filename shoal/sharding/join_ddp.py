"""What torch's `DistributedDataParallel` does not do by itself in a `Join`; the only place that reaches inside it."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def divide_by_live(model: DistributedDataParallel, work: dist.Work | None) -> None:
    """Lets `model` divide by the number of live ranks in its next backward pass, if its join hook was told to.

    Args:
        model: of a `Join`; of all of these torch's own heartbeat tells only the first.
        work: the heartbeat, whose result is that number.
    """
    if work is not None:
        by_initial: bool = vars(model)["_divide_by_initial_world_size"]
        model.reducer._set_forward_pass_work_handle(work, by_initial)


def divide_by_all_ranks(model: DistributedDataParallel, work: dist.Work) -> None:
    """After a `Join`, let `model` divide by the number of ranks again, and not by the last count of live ones.

    Args:
        model: which got its count from heartbeats.
        work: any that is done; `model` must have one, and does not look at it.
    """
    model.reducer._set_forward_pass_work_handle(work, True)
