"""RAdam."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.radam import radam

from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry, check_betas


@dataclass(frozen=True)
class RAdam(FunctionalOptimizer):
    """RAdam (Liu et al. 2019, arXiv 1908.03265), with the options, defaults and numbers of `torch.optim.RAdam`.

    The options are those of `torch.optim.RAdam`: lr, betas, eps, weight_decay, decoupled_weight_decay, foreach,
    maximize, capturable. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True
    foreach_on_cpu: ClassVar[bool] = False

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0
    decoupled_weight_decay: bool = False
    _: KW_ONLY
    foreach: bool | None = None
    maximize: bool = False
    capturable: bool = False
    differentiable: bool = False

    def __post_init__(self) -> None:
        self._check(eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas)

    def _layout(self) -> dict[str, StateEntry]:
        return {"step": NUMBER, "exp_avg": LIKE_PARAMETER, "exp_avg_sq": LIKE_PARAMETER}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        radam(
            params,
            grads,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            decoupled_weight_decay=self.decoupled_weight_decay,
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            weight_decay=self.weight_decay,
            eps=self.eps,
        )
