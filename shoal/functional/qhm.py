"""QHM: quasi-hyperbolic momentum, as a functional optimizer."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor

from shoal.functional._torch import foreach_add, foreach_add_, foreach_lerp_, foreach_mul_, foreach_neg
from shoal.functional.base import LIKE_PARAMETER, FunctionalOptimizer, State, StateEntry, check_fraction


@dataclass(frozen=True)
class QHM(FunctionalOptimizer):
    """Quasi-hyperbolic momentum (Ma and Yarats 2019, arXiv 1810.06801, equations 3 and 4).

    A step computes ``buffer = momentum * buffer + (1 - momentum) * grad``, and then ``param -= lr * ((1 - nu) * grad +
    nu * buffer)``. The buffer is zero at first and is kept over all steps. With ``nu=0`` this is SGD, with ``nu=1`` SGD
    with momentum and dampening of the same size.

    Args:
        lr: the learning rate, at least 0. For the same step size as SGD with momentum, divide SGD's learning rate by
            ``1 - momentum``, as the paper does.
        momentum: the paper's beta, at least 0 and below 1. 0.999 is a good first value.
        nu: the weight of the buffer; the gradient has the weight ``1 - nu``. 0.7 is a good first value. Any finite
            number is allowed: some methods that the paper shows to be QHM need values outside of 0 to 1.
        weight_decay: the weight decay, at least 0. Default: 0.
        weight_decay_type: ``"grad"`` (the default) adds ``weight_decay * param`` to the gradient. ``"direct"``
            multiplies the parameter by ``1 - lr * weight_decay`` instead.
        foreach: the kernel: True for foreach, False for the for-loop, None (the default) for the faster one on the
            device.
        maximize: step along the gradient instead of against it. Default: False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor
    momentum: float
    nu: float
    weight_decay: float = 0.0
    weight_decay_type: Literal["grad", "direct"] = "grad"
    _: KW_ONLY
    foreach: bool | None = None
    maximize: bool = False

    def __post_init__(self) -> None:
        self._check(weight_decay=self.weight_decay)
        check_fraction("momentum", self.momentum)
        if not math.isfinite(self.nu):
            raise ValueError(f"nu is a finite number, got {self.nu}")
        if self.weight_decay_type not in ("grad", "direct"):
            raise ValueError(f'weight_decay_type is "grad" or "direct", got {self.weight_decay_type!r}')

    def _layout(self) -> dict[str, StateEntry]:
        return {"momentum_buffer": LIKE_PARAMETER}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        if foreach:
            self._update_together(params, grads, state["momentum_buffer"])
            return
        for param, grad, buffer in zip(params, grads, state["momentum_buffer"], strict=True):
            self._update_together([param], [grad], [buffer])

    def _update_together(self, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor]) -> None:
        lr = float(self.lr)
        if self.maximize:
            grads = list(foreach_neg(grads))
        if self.weight_decay and self.weight_decay_type == "grad":
            grads = list(foreach_add(grads, params, alpha=self.weight_decay))
        elif self.weight_decay:
            foreach_mul_(params, 1 - lr * self.weight_decay)
        foreach_lerp_(buffers, grads, 1 - self.momentum)
        foreach_add_(params, grads, alpha=-lr * (1 - self.nu))
        foreach_add_(params, buffers, alpha=-lr * self.nu)
