"""A schedule-free optimizer, as small as it can be: SGD whose model trains on one sequence and is evaluated on another.

Source of the rule: Defazio et al. 2024, arXiv 2405.15682, equations 6 to 8.
"""

from __future__ import annotations

from typing import Any

import torch

BETA = 0.9


class AveragingSGD(torch.optim.Optimizer):
    """In train mode the parameters are y, a mixture of the average x and of z, which SGD steps; in eval mode, x."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    @torch.no_grad()
    def train(self) -> None:
        self._become(train=True, weight=1 - BETA)

    @torch.no_grad()
    def eval(self) -> None:
        self._become(train=False, weight=1 - 1 / BETA)

    def _become(self, *, train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is train:
                continue
            group["train_mode"] = train
            for parameter in group["params"]:
                if parameter in self.state:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)  # as some do: no count of writes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train() before training"
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                x = parameter.lerp(z, 1 - 1 / BETA)
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.copy_(x.lerp(z, 1 / group["k"]).lerp(z, 1 - BETA))
