"""Rprop."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim.rprop import rprop

from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry


@dataclass(frozen=True)
class Rprop(FunctionalOptimizer):
    """Rprop (Riedmiller and Braun 1993), with the options, defaults and numbers of `torch.optim.Rprop`.

    The learning rate is the initial step size. As in torch, changing it later has no effect.

    The options are those of `torch.optim.Rprop`: lr, etas, step_sizes, capturable, foreach, maximize.
    `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range.
    """

    element_wise: ClassVar[bool] = True

    lr: float | Tensor = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50)
    _: KW_ONLY
    capturable: bool = False
    foreach: bool | None = None
    maximize: bool = False
    differentiable: bool = False

    def __post_init__(self) -> None:
        self._check()
        if not 0 < self.etas[0] < 1 < self.etas[1]:
            raise ValueError(f"etas are one number between 0 and 1 and one above 1, got {self.etas}")

    def _layout(self) -> dict[str, StateEntry]:
        return {
            "step": NUMBER,
            "prev": LIKE_PARAMETER,
            "step_size": StateEntry(like_parameter=True, initial=float(self.lr)),
        }

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        rprop(
            params,
            grads,
            state["prev"],
            state["step_size"],
            state["step"],
            foreach=foreach,
            maximize=self.maximize,
            capturable=self.capturable,
            has_complex=params[0].is_complex(),
            step_size_min=self.step_sizes[0],
            step_size_max=self.step_sizes[1],
            etaminus=self.etas[0],
            etaplus=self.etas[1],
        )
