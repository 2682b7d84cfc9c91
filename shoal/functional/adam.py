"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from shoal.functional._torch import fused_adam_, fused_adamw_
from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry, check_betas


@dataclass(frozen=True)
class Adam(FunctionalOptimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980), with the options, defaults and numbers of `torch.optim.Adam`.

    The options are those of `torch.optim.Adam`: lr, betas, eps, weight_decay, amsgrad, foreach, maximize,
    capturable, fused, decoupled_weight_decay. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range, or options contradict each other.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor = 1e-3
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0
    amsgrad: bool = False
    _: KW_ONLY
    foreach: bool | None = None
    maximize: bool = False
    capturable: bool = False
    differentiable: bool = False
    fused: bool | None = None
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        self._check(eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas)
        tensors = [isinstance(value, Tensor) for value in (self.lr, *self.betas)]
        if self.foreach and any(tensors) and not self.capturable:
            raise ValueError("with foreach=True, lr and betas may be tensors only if capturable=True")
        if tensors[1] != tensors[2]:
            raise ValueError("betas are two numbers or two tensors")

    def _layout(self) -> dict[str, StateEntry]:
        layout = {"step": NUMBER, "exp_avg": LIKE_PARAMETER, "exp_avg_sq": LIKE_PARAMETER}
        return {**layout, "max_exp_avg_sq": LIKE_PARAMETER} if self.amsgrad else layout

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        update = adamw if self.decoupled_weight_decay else adam
        update(
            params,
            grads,
            *self._averages(state),
            state["step"],
            foreach=foreach,
            capturable=self.capturable,
            fused=False,
            has_complex=params[0].is_complex(),
            amsgrad=self.amsgrad,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )

    def _run_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        update = fused_adamw_ if self.decoupled_weight_decay else fused_adam_
        update(
            params,
            grads,
            *self._averages(state),
            state["step"],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            grad_scale=scale,
            found_inf=found_inf,
        )

    def _averages(self, state: State) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"] if self.amsgrad else []


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): Adam with decoupled weight decay.

    It has the options, defaults and numbers of `torch.optim.AdamW`.

    The options are those of `torch.optim.AdamW`: lr, betas, eps, weight_decay, amsgrad, foreach, maximize,
    capturable, fused. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range, or options contradict each other.
    """

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = field(default=True, init=False)
