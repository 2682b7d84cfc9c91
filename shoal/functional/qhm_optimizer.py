"""QHM as a `torch.optim.Optimizer`: what users meet, and the key under which the functional one is registered."""

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

    The options are those of `shoal.functional.QHM`, which this one steps; each can be set per parameter group, and may
    change between steps.

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        lr: see `shoal.functional.QHM`.
        momentum: see `shoal.functional.QHM`.
        nu: see `shoal.functional.QHM`.
        weight_decay: see `shoal.functional.QHM`.
        weight_decay_type: see `shoal.functional.QHM`.
        foreach: see `shoal.functional.QHM`.
        maximize: see `shoal.functional.QHM`.

    Raises:
        ValueError: for an option out of its range, when the optimizer or the group is made, or at the next step.
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
        """Add a group whose options are the optimizer's where it names none.

        Raises:
            ValueError: for an option out of its range.
        """
        _functional({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the gradients in ``.grad``; a parameter that has none is left alone.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.
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
