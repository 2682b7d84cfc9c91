"""The gradient scaler of mixed precision, where gradients are accumulated over the steps of an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state


class GradScaler(torch.amp.GradScaler):
    """Used exactly as `torch.amp.GradScaler`, whose arguments it has.

    >>> scaler = shoal.GradScaler("cuda")
    >>> for batch in data:
    ...     scaler.scale(loss(model, batch)).backward()
    ...     scaler.step(optimizer, batch_size=32)
    ...     scaler.update()

    With a `shoal.Optimizer` that has `reuse_grad_buffers=True`, `.grad` holds the sum over an epoch's steps, all by one
    scale. So `unscale_` only looks for an overflow there, the optimizer itself unscales when it ends the epoch, and
    `update` changes nothing while gradients are held: the scale grows after the end of an epoch, of which
    `growth_interval` counts. After an overflow this peer's accumulation is dropped, and the scale shrinks at once.

    With any other optimizer it does what torch's does, but that parameters of a `shoal.Optimizer` may be float16.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holding: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose `.grad` hold an epoch's sum
        self._unused = False  # whether an accumulating optimizer was stepped that looked at no gradients

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, or only look for an overflow, as above."""
        if self.is_enabled() and _accumulates(optimizer):
            self._check_inf_per_device(optimizer)
        else:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)`. If the gradients overflowed they are not used; an optimizer that
        accumulates in `.grad` is called all the same, because a round may be due."""
        if not self.is_enabled() or not _accumulates(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("a closure can't be used with a GradScaler: call backward before")
        step: Callable[..., float | None] = optimizer.step
        loss = step(*args, grad_scaler=self, **kwargs)
        # Such as one with a batch_size of 0, or which has downloaded the state instead: `update` has nothing to judge.
        self._unused = not _found_in(self._per_optimizer_states[id(optimizer)])
        return loss

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale, unless gradients are held by the present one."""
        if not self.is_enabled():
            return
        found = [value for state in self._per_optimizer_states.values() for value in _found_in(state)]
        unused, self._unused = self._unused and not found, False
        if new_scale is None and (unused or (self._holding and not any(value.item() for value in found))):
            self._forget_checks()
            return
        before = self.get_scale()
        super().update(new_scale)
        for optimizer in self._holding:  # another optimizer has overflowed, or the user gave a scale
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.get_scale() / before)

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        """For `Optimizer.step`: whether the gradients in `.grad` may be used. They are unscaled if so, unless they stay
        in `.grad`; then the scale stays until `release`."""
        if not self.is_enabled():
            return True
        state = self._per_optimizer_states[id(optimizer)]
        if _accumulates(optimizer):
            if not _found_in(state):
                self._check_inf_per_device(optimizer)
        elif state["stage"] is OptState.READY:
            super().unscale_(optimizer)
        finite = not any(value.item() for value in _found_in(self._per_optimizer_states[id(optimizer)]))
        if finite and _accumulates(optimizer):
            self._holding.add(optimizer)
        elif not finite:
            self._holding.discard(optimizer)
        return finite

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """For `Optimizer.step`: its gradients are not held in `.grad` any more."""
        self._holding.discard(optimizer)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        # torch (2.6 to 2.13) calls it first wherever it needs the scale, which the first call of `scale` makes.
        if self._scale is None:
            raise RuntimeError(
                "the loss of these gradients was not scaled: call GradScaler.scale(loss) before backward"
            )
        return super()._check_scale_growth_tracker(funcname)

    def _forget_checks(self) -> None:
        for key in self._per_optimizer_states:
            self._per_optimizer_states[key] = _refresh_per_optimizer_state()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # The gradients of a shoal.Optimizer are averaged before they are used, so none of torch's reasons holds.
        allow_fp16 = allow_fp16 or hasattr(optimizer, "reuse_grad_buffers")
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _accumulates(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "reuse_grad_buffers", False))


def _found_in(state: dict[str, Any]) -> list[torch.Tensor]:
    return list(state["found_inf_per_device"].values())
