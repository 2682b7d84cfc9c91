"""The gradient scaler of mixed precision, where gradients are accumulated over the steps of an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shoal.flat import parameters_of
from shoal.optim._torch import OpenGradScaler


class GradScaler(OpenGradScaler):
    """Scales the loss of mixed precision. It is used exactly as `torch.amp.GradScaler` and takes the same arguments.

    >>> scaler = shoal.GradScaler("cuda")
    >>> for batch in data:
    ...     scaler.scale(loss(model, batch)).backward()
    ...     scaler.step(optimizer, batch_size=32)
    ...     scaler.update()

    With a `shoal.Optimizer` that has `reuse_grad_buffers=True`, `.grad` holds the sum over the steps of an epoch, and
    all of them must have the same scale. So `unscale_` only looks for an overflow, and the optimizer unscales the sum
    when it ends the epoch. `update` changes nothing until then: an epoch counts as one step of `growth_interval`. After
    an overflow, this peer drops what it has accumulated, and the scale shrinks at once.

    With any other optimizer it does what torch's scaler does, except that the parameters of a `shoal.Optimizer` may be
    float16.

    Args:
        args: the arguments of `torch.amp.GradScaler`.
        kwargs: the keyword arguments of `torch.amp.GradScaler`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The optimizers whose `.grad` hold the sum of an epoch.
        self._holding: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unused = False  # whether the last step of an accumulating optimizer looked at no gradients

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. With `reuse_grad_buffers`, only look for an overflow.

        Args:
            optimizer: the optimizer whose parameters have the gradients.
        """
        if self.is_enabled() and _accumulates(optimizer):
            self.look_for_overflow(optimizer)
        else:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)`. If the gradients overflowed, they are not used. An optimizer that
        accumulates in `.grad` is called even then, because a round may be due.

        Args:
            optimizer: the optimizer to step.
            args: the arguments of its `step`.
            kwargs: the keyword arguments of its `step`.

        Returns:
            What `optimizer.step` returns; None if it was not called.

        Raises:
            RuntimeError: for a closure, or if the loss was not scaled.
        """
        if not self.is_enabled() or not _accumulates(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("a closure can't be used with a GradScaler: call backward before")
        step: Callable[..., float | None] = optimizer.step
        loss = step(*args, grad_scaler=self, **kwargs)
        # A step with a batch_size of 0, or one that downloads the state instead, gives `update` nothing to judge.
        self._unused = not self.overflows_of(optimizer)
        return loss

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale as torch does. While an optimizer accumulates in `.grad` gradients that have the present
        scale, the scale stays as it is, unless gradients have overflowed.

        Args:
            new_scale: the new scale; accumulated gradients are converted to it. None: as torch's rule says.
        """
        if not self.is_enabled():
            return
        found = self.all_overflows()
        unused, self._unused = self._unused and not found, False
        if new_scale is None and (unused or (self._holding and not any(value.item() for value in found))):
            self.forget_overflows()
            return
        before = self.get_scale()
        super().update(new_scale)
        # The scale changes while gradients are held if another optimizer has overflowed, or if the user gives a scale.
        for optimizer in self._holding:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(self.get_scale() / before)

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        """For `Optimizer.step`: unscale the gradients, and return whether they may be used. Gradients that accumulate
        in `.grad` are not unscaled, and the scale stays as it is until `release`."""
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
        """For `Optimizer.step`: `.grad` no longer holds the sum of an epoch."""
        self._holding.discard(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_holding": None}  # a copy has scaled no gradients

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_holding": weakref.WeakSet()})


def _accumulates(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "reuse_grad_buffers", False))
