"""Which of torch's kernels updates tensors of a dtype on a device."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Final

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


SMALL: Final = 16_384
"""Elements. On a CPU, foreach is the faster for tensors smaller than this, which stay in the cache between its
operations; for larger ones it is the for-loop. (Measured: 0.5 to 0.8 of the for-loop's time at 1,000 elements, 0.8 to
0.9 at 10,000, 1.2 to 2.3 at 200,000.)"""


def choose_kernel(optimizer: FunctionalOptimizer, params: Sequence[Tensor]) -> Kernel:
    """The kernel that the options ask for, or the fastest if they leave it open, for tensors of one dtype and device.

    Raises:
        RuntimeError: with ``fused=True`` where torch has no such kernel for the dtype on the device.
    """
    if optimizer.foreach:
        return Kernel.FOREACH
    device, dtype = params[0].device, params[0].dtype
    if optimizer.fused or (optimizer.fused is None and optimizer.foreach is None):
        if has_fused_kernel(type(optimizer), device, dtype):
            return Kernel.FUSED
        if optimizer.fused:
            raise RuntimeError(
                f"torch {torch.__version__} has no fused kernel of {type(optimizer).__name__} for {dtype} on "
                f"{device.type}, or one that gives wrong numbers: leave out fused=True"
            )
    # As in torch, foreach takes a learning rate or betas that are tensors only if they stay on the device.
    tensors = any(isinstance(value, Tensor) for value in (optimizer.lr, *getattr(optimizer, "betas", ())))
    if optimizer.foreach is False or (tensors and not optimizer.capturable):
        return Kernel.LOOP
    if device.type == "cpu":
        small = sum(param.numel() for param in params) < SMALL * len(params)
        return Kernel.FOREACH if small and optimizer.foreach_on_cpu else Kernel.LOOP
    return Kernel.FOREACH


@cache
def has_fused_kernel(optimizer_class: type[FunctionalOptimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this version of torch has one that is right: found by trying it once on a few elements.

    (In torch 2.13 the CPU's fused SGD with momentum leaves 16-bit parameters as they are.)
    """
    if not dtype.is_floating_point:
        return False
    results = []
    for options in ({"fused": True}, {"foreach": False}):
        optimizer = optimizer_class(**optimizer_class.trial_options, **options)
        param = torch.zeros(67, dtype=dtype, device=device)  # more than a vector register, and a rest
        state = {
            name: [torch.zeros_like(param) if entry.like_parameter else torch.zeros((), device=device)]
            for name, entry in optimizer.state_layout.items()
        }
        grads = [torch.ones_like(param)]
        try:
            with torch.no_grad():
                if optimizer.fused:
                    optimizer._update_fused([param], grads, state, None, None)
                else:
                    optimizer._update([param], grads, state, foreach=False)
        except torch.OutOfMemoryError:  # says nothing about kernels
            raise
        except (NotImplementedError, RuntimeError):
            return False
        results.append(param)
    fused, loop = results
    return torch.allclose(fused, loop, rtol=0.05, atol=0)


def advance(steps: list[Tensor]) -> None:
    """Add 1 to all counters: with one operation if they are all the views of one tensor, as ``init()`` makes them."""
    together = steps[0]._base
    if len(steps) == 1:
        steps[0].add_(1)
    elif together is not None and together.numel() == len(steps) and all([step._base is together for step in steps]):  # noqa: C419 - faster than a generator
        together.add_(1)
    elif steps[0].is_cpu:
        # With a number in the place of the tensor, foreach would make one anew for every step.
        torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def take_back(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Subtract what `advance` added if the update was skipped."""
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.reshape(())] * len(steps))
