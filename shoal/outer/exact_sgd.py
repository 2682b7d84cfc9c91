"""Stochastic gradient descent with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

BLOCK_ELEMENTS = 1 << 16  # of each thread, at a time: what a block's operations read and write stays in its cache


class ExactSGD(torch.optim.Optimizer):
    """`torch.optim.SGD`, with momentum as defined there, computed by single multiplications and additions.

    Each is one operation of IEEE 754, rounded once, so peers on unlike processors get equal bits. torch's own
    optimizers multiply and add in one operation where the processor can, which rounds differently. A step differs from
    torch's by at most a few units in the last place.

    Args:
        params: tensors or parameter groups, as for torch's optimizers.
        lr: the learning rate.
        momentum: the factor by which the last step's direction is kept; 0 for none.
        nesterov: use Nesterov's momentum, in the form of Sutskever et al. 2013 (PMLR 28). Default: False.
    """

    element_wise = True  # see `shoal.sharding.element_wise`

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Makes one step with the parameters' `.grad`. A parameter without a gradient keeps its value and its momentum.

        Args:
            closure: evaluated first, with gradients enabled; None for none.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, momentum, nesterov = group["lr"], group["momentum"], group["nesterov"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = (self._kept(parameter),) if momentum else ()
                    for values, *others in _blocks(parameter, parameter.grad, *kept):
                        values.sub_(torch.mul(_direction(*others, momentum=momentum, nesterov=nesterov), rate))
        return loss

    def _kept(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        kept: torch.Tensor = state["momentum_buffer"]
        return kept


def _direction(
    gradient: torch.Tensor, kept: torch.Tensor | None = None, *, momentum: float, nesterov: bool
) -> torch.Tensor:
    if kept is None:
        return gradient
    kept.mul_(momentum).add_(gradient)
    return torch.mul(kept, momentum).add_(gradient) if nesterov else kept


def _blocks(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """The elements of these tensors of one shape, block by block. All at once if they are not on a CPU, where each
    operation costs more than its memory traffic, or lie in memory differently."""
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    elements = BLOCK_ELEMENTS * torch.get_num_threads()
    return zip(*(torch.split(tensor.view(-1), elements) for tensor in tensors), strict=True)
