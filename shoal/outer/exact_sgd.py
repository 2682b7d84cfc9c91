"""Stochastic gradient descent with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
                    direction = self._direction(parameter, momentum, nesterov)
                    parameter.sub_(torch.mul(direction, rate))
        return loss

    def _direction(self, parameter: torch.Tensor, momentum: float, nesterov: bool) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if not momentum:
            return gradient
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        kept: torch.Tensor = state["momentum_buffer"]
        kept.mul_(momentum).add_(gradient)
        return torch.mul(kept, momentum).add_(gradient) if nesterov else kept
