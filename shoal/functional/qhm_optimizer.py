"""QHM as a `torch.optim.Optimizer`: the class that users use, and the key under which the functional one is
registered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shoal.functional import qhm


class QHM(Optimizer):
    """Quasi-hyperbolic momentum (Ma and Yarats 2019, arXiv 1810.06801) as a torch optimizer.

    Its options and numbers are those of `shoal.functional.QHM`. Each option can be set per parameter group and may
    change between steps.

    A step computes ``buffer = momentum * buffer + (1 - momentum) * grad``, and then ``param -= lr * ((1 - nu) * grad +
    nu * buffer)``.

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        lr: the learning rate, at least 0. For the same step size as SGD with momentum, divide SGD's learning rate by
            ``1 - momentum``, as the paper does.
        momentum: the paper's beta, at least 0 and below 1. 0.999 is a good first value.
        nu: the weight of the buffer, any finite number. 0.7 is a good first value.
        weight_decay: the weight decay, at least 0. Default: 0.
        weight_decay_type: ``"grad"`` (the default) adds ``weight_decay * param`` to the gradient. ``"direct"``
            multiplies the parameter by ``1 - lr * weight_decay`` instead.
        foreach: the kernel: True for foreach, False for the for-loop, None (the default) for the faster one on the
            device.
        maximize: step along the gradient instead of against it. Default: False.

    Raises:
        ValueError: if an option is out of its range: when the optimizer or a group is made, or at the next step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float,
        nu: float,
        weight_decay: float = 0.0,
        weight_decay_type: Literal["grad", "direct"] = "grad",
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = qhm.QHM(lr, momentum, nu, weight_decay, weight_decay_type, foreach=foreach, maximize=maximize)
        super().__init__(params, {field.name: getattr(options, field.name) for field in fields(options)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. Options that it does not name are those of the optimizer.

        Args:
            param_group: a dictionary with ``params`` and the options that differ.

        Raises:
            ValueError: if an option is out of its range.
        """
        _functional({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step with the gradients in ``.grad``. A parameter without a gradient is left alone.

        Args:
            closure: evaluates the model again and returns the loss; None if the gradients are there already.

        Returns:
            The result of the closure, or None.

        Raises:
            ValueError: if an option is out of its range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            functional = _functional(group)
            params = [param for param in group["params"] if param.grad is not None]
            fresh = [param for param in params if not self.state[param]]
            for name, tensors in functional.init(fresh).items():
                for param, tensor in zip(fresh, tensors, strict=True):
                    self.state[param][name] = tensor
            state = {name: [self.state[param][name] for param in params] for name in functional.state_layout}
            functional.step(params, [param.grad for param in params], state)
        return loss


def _functional(group: dict[str, Any]) -> qhm.QHM:
    return qhm.QHM(**{field.name: group[field.name] for field in fields(qhm.QHM)})
