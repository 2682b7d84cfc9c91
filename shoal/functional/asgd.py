"""ASGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.asgd import asgd

from shoal.functional.base import LIKE_PARAMETER, FunctionalOptimizer, State, StateEntry


@dataclass(frozen=True)
class ASGD(FunctionalOptimizer):
    """Averaged SGD (Polyak and Juditsky 1992), with the options, defaults and numbers of `torch.optim.ASGD`.

    The averaged parameters are in the state, under the name ``ax``.

    The options are those of `torch.optim.ASGD`: lr, lambd, alpha, t0, weight_decay, foreach, maximize, capturable.
    `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True
    foreach_on_cpu: ClassVar[bool] = False

    lr: float | Tensor = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False
    capturable: bool = False

    def __post_init__(self) -> None:
        self._check(weight_decay=self.weight_decay)

    def _layout(self) -> dict[str, StateEntry]:
        return {
            "step": StateEntry(like_parameter=False, on_device=True),
            "eta": StateEntry(like_parameter=False, initial=float(self.lr), on_device=True),
            "mu": StateEntry(like_parameter=False, initial=1.0, on_device=True),
            "ax": LIKE_PARAMETER,
        }

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        asgd(
            params,
            grads,
            state["ax"],
            state["mu"],
            state["eta"],
            state["step"],
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            lambd=self.lambd,
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            t0=self.t0,
            alpha=self.alpha,
            weight_decay=self.weight_decay,
        )
