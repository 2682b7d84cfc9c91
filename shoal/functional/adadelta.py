"""Adadelta."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.adadelta import adadelta

from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry


@dataclass(frozen=True)
class Adadelta(FunctionalOptimizer):
    """Adadelta (Zeiler 2012, arXiv 1212.5701), with the options, defaults and numbers of `torch.optim.Adadelta`.

    The options are those of `torch.optim.Adadelta`: lr, rho, eps, weight_decay, foreach, capturable, maximize.
    `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0
    foreach: bool | None = None
    _: KW_ONLY
    capturable: bool = False
    maximize: bool = False
    differentiable: bool = False

    def __post_init__(self) -> None:
        self._check(eps=self.eps, weight_decay=self.weight_decay)
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho is from 0 to 1, got {self.rho}")

    def _layout(self) -> dict[str, StateEntry]:
        return {"step": NUMBER, "square_avg": LIKE_PARAMETER, "acc_delta": LIKE_PARAMETER}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        adadelta(
            params,
            grads,
            state["square_avg"],
            state["acc_delta"],
            state["step"],
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            rho=self.rho,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
