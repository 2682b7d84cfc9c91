"""QHM in the class form of PyTorch's recipe, with its mistakes corrected: the buffer stays, and `add_` is today's.

Without `from __future__ import annotations`: TorchScript reads the annotations.
"""

from typing import Dict, List, Optional  # noqa: UP035

import torch
from torch import Tensor


def qhm_update(
    params: List[Tensor],  # noqa: UP006
    grads: List[Tensor],  # noqa: UP006
    buffers: List[Tensor],  # noqa: UP006
    lr: float,
    momentum: float,
    nu: float,
    weight_decay: float,
    weight_decay_type: str,
) -> None:
    for param, grad, buffer in zip(params, grads, buffers):  # noqa: B905 - TorchScript has no strict
        direction = grad
        if weight_decay != 0 and weight_decay_type == "grad":
            direction = grad.add(param, alpha=weight_decay)
        elif weight_decay != 0:
            param.mul_(1.0 - lr * weight_decay)
        buffer.mul_(momentum).add_(direction, alpha=1.0 - momentum)
        param.add_(buffer, alpha=-lr * nu)
        param.add_(direction, alpha=-lr * (1.0 - nu))


@torch.jit.script
class FunctionalQHM:
    def __init__(
        self,
        params: List[Tensor],  # noqa: UP006
        lr: float,
        momentum: float,
        nu: float,
        weight_decay: float = 0.0,
        weight_decay_type: str = "grad",
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        self.defaults = {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay}
        self.weight_decay_type = weight_decay_type
        self.param_group = {"params": params}
        self.state = torch.jit.annotate(Dict[Tensor, Dict[str, Tensor]], {})  # noqa: UP006

    def step(self, gradients: List[Optional[Tensor]]) -> None:  # noqa: UP006, UP045
        params = self.param_group["params"]
        if len(params) != len(gradients):
            raise ValueError("one gradient per parameter")
        with_grad: List[Tensor] = []  # noqa: UP006
        grads: List[Tensor] = []  # noqa: UP006
        buffers: List[Tensor] = []  # noqa: UP006
        for param, gradient in zip(params, gradients):  # noqa: B905
            if gradient is not None:
                if param not in self.state:
                    self.state[param] = {"momentum_buffer": torch.zeros_like(param)}
                with_grad.append(param)
                grads.append(gradient)
                buffers.append(self.state[param]["momentum_buffer"])
        with torch.no_grad():
            qhm_update(
                with_grad,
                grads,
                buffers,
                self.defaults["lr"],
                self.defaults["momentum"],
                self.defaults["nu"],
                self.defaults["weight_decay"],
                self.weight_decay_type,
            )
