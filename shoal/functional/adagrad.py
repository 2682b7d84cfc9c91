"""Adagrad."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.adagrad import adagrad

from shoal.functional._torch import fused_adagrad_
from shoal.functional.base import NUMBER, FunctionalOptimizer, State, StateEntry


@dataclass(frozen=True)
class Adagrad(FunctionalOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011), with the options, defaults and numbers of `torch.optim.Adagrad`.

    The options are those of `torch.optim.Adagrad`: lr, lr_decay, weight_decay, initial_accumulator_value, eps,
    foreach, maximize, fused. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    lr: float | Tensor = 1e-2
    lr_decay: float = 0
    weight_decay: float = 0
    initial_accumulator_value: float = 0
    eps: float = 1e-10
    foreach: bool | None = None
    _: KW_ONLY
    maximize: bool = False
    differentiable: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        self._check(
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            initial_accumulator_value=self.initial_accumulator_value,
            eps=self.eps,
        )

    def _layout(self) -> dict[str, StateEntry]:
        return {"step": NUMBER, "sum": StateEntry(like_parameter=True, initial=self.initial_accumulator_value)}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        adagrad(
            params,
            grads,
            state["sum"],
            state["step"],
            fused=False,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            foreach=foreach,
            has_complex=params[0].is_complex(),
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            weight_decay=self.weight_decay,
            lr_decay=self.lr_decay,
            eps=self.eps,
            maximize=self.maximize,
        )

    def _run_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        fused_adagrad_(
            params,
            grads,
            state["sum"],
            state["step"],
            lr=self.lr,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
            grad_scale=scale,
            found_inf=found_inf,
        )
