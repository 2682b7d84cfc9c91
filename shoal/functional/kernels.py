"""Which of torch's kernels updates tensors of a dtype on a device."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.functional.base import FunctionalOptimizer


class Kernel(Enum):
    """A way to run an update, as torch.optim names them."""

    FUSED = "fused"
    """One operation that reads and writes every byte once."""
    FOREACH = "foreach"
    """One operation per term of the formula, each over all tensors."""
    LOOP = "for-loop"
    """The formula once for every tensor."""


def choose_kernel(optimizer: FunctionalOptimizer, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that the options ask for, or the fastest if they leave it open.

    Raises:
        RuntimeError: with ``fused=True`` where torch has no such kernel for the dtype on the device.
    """
    if optimizer.foreach:
        return Kernel.FOREACH
    if optimizer.fused or (optimizer.fused is None and optimizer.foreach is None):
        if has_fused_kernel(type(optimizer), device, dtype):
            return Kernel.FUSED
        if optimizer.fused:
            raise RuntimeError(
                f"torch {torch.__version__} has no fused kernel of {type(optimizer).__name__} for {dtype} on "
                f"{device.type}: leave out fused=True"
            )
    # On a CPU the for-loop is the faster, since what one tensor needs stays in the cache. On an accelerator foreach
    # starts fewer kernels; as in torch it takes a learning rate that is a tensor only if that stays on the device.
    by_loop = optimizer.foreach is False or device.type == "cpu"
    return Kernel.LOOP if by_loop or (isinstance(optimizer.lr, Tensor) and not optimizer.capturable) else Kernel.FOREACH


@cache
def has_fused_kernel(optimizer_class: type[FunctionalOptimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this version of torch has one: found by trying it once on one element."""
    if not dtype.is_floating_point:
        return False
    one = torch.zeros(1, dtype=dtype, device=device)
    state = {
        name: [torch.zeros_like(one) if entry.like_parameter else torch.zeros((), device=device)]
        for name, entry in optimizer_class().state_layout.items()
    }
    try:
        with torch.no_grad():
            optimizer_class()._update_fused([one], [one.clone()], state, None, None)
    except torch.OutOfMemoryError:  # says nothing about kernels
        raise
    except (NotImplementedError, RuntimeError):
        return False
    return True


def advance(steps: list[Tensor]) -> None:
    """Add 1 to all counters: with one operation if they are all the views of one tensor, as ``init()`` makes them."""
    together = steps[0]._base
    if together is not None and together.numel() == len(steps) and all(step._base is together for step in steps):
        together.add_(1)
    elif steps[0].is_cpu:
        # With a number in the place of the tensor, foreach would make one anew for every step.
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def take_back(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Subtract what `advance` added if the update was skipped."""
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.reshape(())] * len(steps))
