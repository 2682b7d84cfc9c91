"""Optimizers that use their closure as well-known ones do, for test_closures.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Base(torch.optim.Optimizer):
    """SGD with momentum; members use their closure in one way."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "made": 0})

    @property
    def each(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def rate(self, loss: Any) -> float:
        return float(self.param_groups[0]["lr"])

    @torch.no_grad()
    def update(self, loss: Any = None) -> None:
        rate = self.rate(loss)
        for p in self.each:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.5).add_(p.grad)
            p.add_(momentum, alpha=-rate)

    def perturb(self, by: float = 0.05) -> None:
        self.param_groups[0]["made"] += 1
        for p in self.each:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad, alpha=by)

    def back(self) -> None:
        for p in self.each:
            p.copy_(self.state[p].pop("before"))


class Reads(Base):
    """Its step size is the loss over the norm of the gradients (AliG)."""

    def rate(self, loss: Any) -> float:
        if loss is None:
            return 0.0
        squares = sum(float(p.grad.square().sum()) for p in self.each)
        return min(0.1, float(loss.detach() if isinstance(loss, Tensor) else loss) / squares)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(loss)
        return loss


class ReadsByName(Reads):
    """The same, with another first argument."""

    def step(self, grads: None = None, *, closure: Any = None) -> Any:  # type: ignore[override]
        assert grads is None
        return super().step(closure)


class Sam(Base):
    """Evaluates the loss, and evaluates it again where the gradient leads to (SAM)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.perturb()
        closure()
        self.back()
        self.update()
        return loss


class SamThatClears(Base):
    """Clears the gradients itself, so that its closure need not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.perturb()
        self.zero_grad()
        closure()
        self.back()
        self.update()
        self.zero_grad()
        return loss


class SamAfterBackward(Base):
    """Moves the parameters before it evaluates the loss."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.perturb()
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        self.back()
        self.update()
        return loss


class SamByData(Base):
    """The same, by writes that torch does not count, and leaves it to its closure to clear the gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.each:
            p.data += 0.01
        with torch.enable_grad():
            loss = closure()
        for p in self.each:
            p.data -= 0.01
        self.update()
        return loss


class LookSam(Sam):
    """Evaluates it again in every third step only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        if self.param_groups[0]["steps"] % 3 == 0:
            return Sam.step(self, closure)
        loss = torch.enable_grad()(closure)()
        self.update()
        return loss


class Clears(Base):
    """Computes the gradients itself."""

    def step(self, closure: Any = None) -> Any:
        for p in self.each:
            p.grad.data.zero_()
        loss = closure()
        self.update()
        return loss


class Hides(Sam):
    """Catches what its closure raises."""

    def step(self, closure: Any = None) -> Any:
        try:
            return super().step(closure)
        except RuntimeError:
            return None


class Holds(Base):
    """Holds another optimizer, which has stepped by the time of the second call."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.held = Base(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        self.held.update()
        return closure()
