"""The kernels by which torch can run an update, and the step counters that its fused kernels need."""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch
from torch import Tensor

from shoal.functional._torch import base_of, foreach_add_, foreach_sub_


class Kernel(Enum):
    """A way to run an update, named as in torch.optim."""

    FUSED = "fused"
    """One operation that reads and writes every byte once."""
    FOREACH = "foreach"
    """One operation per term of the formula, each over all tensors."""
    LOOP = "for-loop"
    """The formula once for every tensor."""


SMALL: Final = 16_384
"""Elements. On a CPU, foreach is faster than the for-loop for tensors smaller than this, because they stay in the cache
between its operations. (Measured: 0.5 to 0.8 of the for-loop's time at 1,000 elements, 0.8 to 0.9 at 10,000, 1.2 to 2.3
at 200,000.)"""


def advance(steps: list[Tensor]) -> None:
    """Adds 1 to all counters, in one operation if they are all the views of one tensor, as ``init()`` makes them."""
    together = base_of(steps[0])
    if len(steps) == 1:
        steps[0].add_(1)
    elif together is not None and together.numel() == len(steps) and all([base_of(step) is together for step in steps]):  # noqa: C419 - faster than a generator
        together.add_(1)
    elif steps[0].is_cpu:
        # With a number instead of this tensor, foreach would convert it to a new tensor for every counter.
        foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    else:
        foreach_add_(steps, 1)


def take_back(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Subtracts again what `advance` added, if the update was skipped."""
    if found_inf is not None:
        foreach_sub_(steps, [found_inf.reshape(())] * len(steps))
