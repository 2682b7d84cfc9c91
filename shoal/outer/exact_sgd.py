"""Stochastic gradient descent whose bits are the same on every processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ExactSGD(torch.optim.Optimizer):
    """As `torch.optim.SGD`, with momentum as there, made of single multiplications and additions.

    Each of them is one operation of IEEE 754, rounded once, so peers on unlike processors end with equal bits.
    torch's own optimizers multiply and add in one operation where the processor can, which rounds otherwise: a step
    differs from theirs by at most a few units in the last place.

    Args:
        params: as torch's optimizers take them.
        lr: the learning rate.
        momentum: the part of the last step's direction that stays; 0 for none.
        nesterov: look ahead by one step, as Sutskever et al. 2013 (PMLR 28) write it.
    """

    element_wise = True  # see `shoal.sharding.element_wise`

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Make one step with the parameters' `.grad`; one without a gradient stays, and so does its momentum.

        Args:
            closure: evaluated first, with gradients enabled; its result is returned.
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
