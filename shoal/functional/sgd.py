"""SGD, with and without momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from shoal.functional._torch import fused_sgd_
from shoal.functional.base import LIKE_PARAMETER, NUMBER, FunctionalOptimizer, State, StateEntry
from shoal.functional.kernels import advance


@dataclass(frozen=True)
class SGD(FunctionalOptimizer):
    """Stochastic gradient descent, with the options, defaults and numbers of `torch.optim.SGD`.

    torch makes the momentum buffer at a tensor's first gradient, and copies that gradient undampened. A buffer of zeros
    gives the same result, unless dampening reduces the first gradient. So with dampening the state has one more name,
    ``step``: the number of steps that the tensor has made.

    The options are those of `torch.optim.SGD`: lr, momentum, dampening, weight_decay, nesterov, maximize, foreach,
    fused. `differentiable` must be False.

    Raises:
        ValueError: if an option is out of its range, or options contradict each other.
    """

    element_wise: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    trial_options: ClassVar[dict[str, Any]] = {"momentum": 0.9}

    lr: float | Tensor = 1e-3
    momentum: float = 0
    dampening: float = 0
    weight_decay: float = 0
    nesterov: bool = False
    _: KW_ONLY
    maximize: bool = False
    foreach: bool | None = None
    differentiable: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        self._check(momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")

    def complete(self, entry: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """As in the base class. A buffer in a torch.optim state dict has had its first gradient, so ``step`` is 1 if
        missing.
        """
        complete = super().complete(entry)
        if "step" in self.state_layout and "momentum_buffer" in complete:
            complete.setdefault("step", torch.tensor(1.0, device="cpu"))
        return complete

    def reduce(self, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in the base class. A buffer of zeros is left out: torch would take it for one that has had its first
        gradient.
        """
        if "step" not in entry:
            return super().reduce(entry)
        return {"momentum_buffer": entry["momentum_buffer"]} if entry["step"] > 0 else {}

    def _layout(self) -> dict[str, StateEntry]:
        if self.momentum == 0:
            return {}
        if self.dampening == 0:
            return {"momentum_buffer": LIKE_PARAMETER}
        return {"step": NUMBER, "momentum_buffer": LIKE_PARAMETER}

    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        # For None, torch puts a new buffer into the list.
        buffers: list[Tensor | None] = [None] * len(params)
        if self.momentum:
            first = self._first(state)
            buffers = [None if first[row] else buffer for row, buffer in enumerate(state["momentum_buffer"])]
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            foreach=foreach,
            fused=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,  # type: ignore[arg-type] # a tensor is as good
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
        )
        if "step" in self.state_layout:
            for buffer, new in zip(state["momentum_buffer"], buffers, strict=True):
                if new is not None and new is not buffer:
                    buffer.copy_(new)
            advance(state["step"])

    def _run_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        columns = [params, grads, state["momentum_buffer"] if self.momentum else []]
        parts = [(columns, self.dampening)]
        if "step" in self.state_layout:  # a tensor's first gradient is not dampened
            first = [step.item() == 1 for step in state["step"]]
            parts = []
            for is_first in set(first):
                rows = [row for row in range(len(params)) if first[row] is is_first]
                part = [[column[row] for row in rows] for column in columns]
                parts.append((part, 0.0 if is_first else self.dampening))
        for (some, gradients, buffers), dampening in parts:
            fused_sgd_(
                some,
                gradients,
                buffers,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=dampening,
                nesterov=self.nesterov,
                maximize=self.maximize,
                # The buffers are zeros at the first step. With True, some elements of 16-bit buffers stay unwritten
                # (torch 2.13).
                is_first_step=False,
                grad_scale=scale,
                found_inf=found_inf,
            )

    def _first(self, state: State) -> list[bool]:
        """For every tensor, whether torch would have no buffer yet. This makes a difference only with dampening."""
        if "step" not in self.state_layout:
            return [False] * len(state["momentum_buffer"])
        return [step.item() == 0 for step in state["step"]]
