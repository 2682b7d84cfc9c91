"""What torch's `DistributedDataParallel` does not do by itself in a `Join`; the only place that reaches inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def gradients_kept(model: DistributedDataParallel) -> Iterator[None]:
    """While a joined rank shadows `model`, let its `.grad` be the gradients that the live ranks get.

    The hook of `model` reduces buckets of zeros and drops the result, so `.grad` would stay what it was in the last
    iteration with inputs. Whoever owns a shard of the optimizer's state needs the true ones.
    """
    vars(model)["_match_all_reduce_for_bwd_pass"] = partial(_reduce, model)
    try:
        yield
    finally:
        del vars(model)["_match_all_reduce_for_bwd_pass"]  # the class's is found again


def _reduce(model: DistributedDataParallel) -> None:
    """Reduce one bucket of zeros for each bucket of the live ranks, in their order, and keep the results."""
    buckets: list[dist.GradBucket] = model.reducer._get_zeros_like_grad_buckets()
    for bucket, future in [(bucket, model.reducer._run_comm_hook(bucket)) for bucket in buckets]:
        reduced = future.wait()
        # As DDP reads the result of a communication hook: a tensor, or a list with one.
        bucket.set_buffer(reduced if isinstance(reduced, torch.Tensor) else reduced[0])
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)


def divide_by_all_ranks(model: DistributedDataParallel, work: dist.Work) -> None:
    """After a `Join`, let `model` divide by the number of ranks again, and not by the last count of live ones.

    Args:
        model: which got its count from heartbeats.
        work: any that is done; `model` must have one, and does not look at it.
    """
    model.reducer._set_forward_pass_work_handle(work, True)
