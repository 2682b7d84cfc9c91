"""`ZeroRedundancyOptimizer` where a cluster's strands have already divided the parameters over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch.optim import Optimizer

_is_cut: ContextVar[bool] = ContextVar("is_cut", default=False)


@contextlib.contextmanager
def cut_already() -> Iterator[None]:
    """A context in which the parameters given to an optimizer are this rank's share, and the optimizer divides
    nothing.
    """
    token = _is_cut.set(True)
    try:
        yield
    finally:
        _is_cut.reset(token)


def is_cut() -> bool:
    """Whether the caller is within `cut_already`."""
    return _is_cut.get()


def of_share(
    params: Any,
    optimizer_class: Callable[..., Optimizer],
    process_group: object = None,
    parameters_as_bucket_view: bool = False,
    overlap_with_ddp: bool = False,
    *,
    partition: object = "auto",
    **given: Any,
) -> Optimizer:
    """The optimizer of one share: `ZeroRedundancyOptimizer` of these arguments would make it for its share `params`.

    Raises:
        ValueError: for an argument that would have no effect here.
    """
    own = ("reduce_scatter", "buffers_of", "offload", "master_weights")
    unused = ["overlap_with_ddp"] * overlap_with_ddp + [name for name in own if given.pop(name, None)]
    if unused:
        raise ValueError(
            f"in a shoal.Cluster, the cluster divides the optimizer's state over its ranks, and leaves no use for "
            f"ZeroRedundancyOptimizer({unused[0]}=…): leave it out, and wrap the model in DistributedDataParallel"
        )
    return optimizer_class(params, **given)
