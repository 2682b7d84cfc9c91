"""An optimizer with state of no parameter, on which its step depends, as MADGRAD has it."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.SGD):
    """SGD whose steps become smaller with a count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["k"] = state.get("k", torch.tensor(0)) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / float(state["k"]))
