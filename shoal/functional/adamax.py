"""Adamax."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.adamax import adamax

from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry, check_betas


@dataclass(frozen=True)
class Adamax(FunctionalOptimizer):
    """Adamax (Kingma and Ba 2015, arXiv 1412.6980), with the options, defaults and numbers of `torch.optim.Adamax`.

    The options are those of `torch.optim.Adamax`: lr, betas, eps, weight_decay, foreach, maximize, capturable.
    `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0
    foreach: bool | None = None
    _: KW_ONLY
    maximize: bool = False
    differentiable: bool = False
    capturable: bool = False

    def __post_init__(self) -> None:
        self._check(eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas)

    def _layout(self) -> dict[str, StateEntry]:
        return {"step": NUMBER, "exp_avg": LIKE_PARAMETER, "exp_inf": LIKE_PARAMETER}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        adamax(
            params,
            grads,
            state["exp_avg"],
            state["exp_inf"],
            state["step"],
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            eps=self.eps,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            weight_decay=self.weight_decay,
        )
