"""RMSprop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.rmsprop import rmsprop

from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry


@dataclass(frozen=True)
class RMSprop(FunctionalOptimizer):
    """RMSprop (Hinton 2012), with the options, defaults and numbers of `torch.optim.RMSprop`.

    The centered variant is that of Graves (2013, arXiv 1308.0850).

    The options are those of `torch.optim.RMSprop`: lr, alpha, eps, weight_decay, momentum, centered, capturable,
    foreach, maximize. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0
    momentum: float = 0
    centered: bool = False
    capturable: bool = False
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False

    def __post_init__(self) -> None:
        self._check(alpha=self.alpha, eps=self.eps, weight_decay=self.weight_decay, momentum=self.momentum)

    def _layout(self) -> dict[str, StateEntry]:
        layout = {"step": NUMBER, "square_avg": LIKE_PARAMETER}
        if self.momentum > 0:
            layout["momentum_buffer"] = LIKE_PARAMETER
        if self.centered:
            layout["grad_avg"] = LIKE_PARAMETER
        return layout

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        rmsprop(
            params,
            grads,
            state["square_avg"],
            state["grad_avg"] if self.centered else [],
            state["momentum_buffer"] if self.momentum > 0 else [],
            state["step"],
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            centered=self.centered,
        )
