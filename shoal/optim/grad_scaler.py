"""The gradient scaler of mixed precision, where gradients are accumulated over the steps of an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shoal.optim._torch import OpenGradScaler


class GradScaler(OpenGradScaler):
    """Used exactly as `torch.amp.GradScaler`, whose arguments it has.

    >>> scaler = shoal.GradScaler("cuda")
    >>> for batch in data:
    ...     scaler.scale(loss(model, batch)).backward()
    ...     scaler.step(optimizer, batch_size=32)
    ...     scaler.update()

    With a `shoal.Optimizer` that has `reuse_grad_buffers=True`, `.grad` holds the sum over an epoch's steps, all with
    one scale. There, `unscale_` only looks for an overflow, the optimizer unscales the sum when it ends the epoch, and
    `update` changes nothing while gradients are held: the scale grows after the end of an epoch, which counts as one
    step of `growth_interval`. After an overflow, this peer's accumulation is dropped and the scale shrinks at once.

    With any other optimizer it does what torch's scaler does, except that the parameters of a `shoal.Optimizer` may be
    float16.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holding: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose `.grad` hold an epoch's sum
        self._unused = False  # whether an accumulating optimizer was stepped that looked at no gradients

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, or only look for an overflow, as described above."""
        if self.is_enabled() and _accumulates(optimizer):
            self.look_for_overflow(optimizer)
        else:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)`. Gradients that overflowed are not used; an optimizer that accumulates
        in `.grad` is called all the same, because a round may be due."""
        if not self.is_enabled() or not _accumulates(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("a closure can't be used with a GradScaler: call backward before")
        step: Callable[..., float | None] = optimizer.step
        loss = step(*args, grad_scaler=self, **kwargs)
        # A step with a batch_size of 0, or one that has downloaded the state instead, leaves `update` nothing to judge.
        self._unused = not self.overflows_of(optimizer)
        return loss

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale, unless gradients are held that were scaled by the present one."""
        if not self.is_enabled():
            return
        found = self.all_overflows()
        unused, self._unused = self._unused and not found, False
        if new_scale is None and (unused or (self._holding and not any(value.item() for value in found))):
            self.forget_overflows()
            return
        before = self.get_scale()
        super().update(new_scale)
        for optimizer in self._holding:  # another optimizer has overflowed, or the user gave a scale
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.get_scale() / before)

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        """For `Optimizer.step`: whether the gradients in `.grad` may be used. This unscales them, unless they stay in
        `.grad`; then the scale stays as it is until `release`."""
        if not self.is_enabled():
            return True
        if _accumulates(optimizer):
            if not self.overflows_of(optimizer):
                self.look_for_overflow(optimizer)
        elif self.may_unscale(optimizer):
            super().unscale_(optimizer)
        finite = not any(value.item() for value in self.overflows_of(optimizer))
        if finite and _accumulates(optimizer):
            self._holding.add(optimizer)
        elif not finite:
            self._holding.discard(optimizer)
        return finite

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """For `Optimizer.step`: its gradients are no longer held in `.grad`."""
        self._holding.discard(optimizer)


def _accumulates(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "reuse_grad_buffers", False))
