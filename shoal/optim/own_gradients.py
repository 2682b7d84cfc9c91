"""Gradients that an averager of the user's own (`grad_averager_factory`) accumulates and averages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shoal.averaging.control import StepControl
from shoal.averaging.errors import AveragingError
from shoal.optim.gradient_averager import GradientAverager

log = logging.getLogger(__name__)


class AveragerGradients:
    """Stands where `GradientBuffers` do. The averager has rounds of its own, before those of the run, which then
    average no gradients. A parameter that got no gradient counts as one with zeros.

    Args:
        factory: makes the averager: called with the parameters and `options`.
        parameters: those that get gradients.

    Raises ValueError if it makes something else than a `GradientAverager`.
    """

    def __init__(self, factory: Callable[..., Any], parameters: Sequence[torch.Tensor], **options: Any) -> None:
        averager = factory(parameters, **options)
        if not isinstance(averager, GradientAverager):
            raise ValueError(f"grad_averager_factory made a {type(averager).__name__}: make a shoal.GradientAverager")
        self.averager = averager
        self._control: StepControl | None = None

    @property
    def samples(self) -> float:
        """Behind what is accumulated."""
        return self.averager.local_samples_accumulated

    def accumulate(self, batch_size: int) -> None:
        """Take the parameters' `.grad`, the mean over `batch_size` samples."""
        self.averager.accumulate_grads_(batch_size)

    def reset(self) -> None:
        """Drop what was accumulated."""
        self.averager.reset_accumulated_grads_()

    def close(self, scale: float = 1.0) -> float:
        """Begin the averager's round with what was accumulated; returns how many samples are behind it.

        Args:
            scale: by which the gradients in `.grad` are too large.
        """
        if scale != 1.0:
            torch._foreach_div_([p.grad for p in self.averager.parameters if p.grad is not None], scale)
        self._control = self.averager.step(reset_accumulators=False, wait=False)
        return self.samples

    def average(self, timeout: float) -> None:
        """Wait for that round; where it fails, the average is this peer's own."""
        control, self._control = self._control, None
        if control is None:
            return
        try:
            control.result(timeout)
        except (AveragingError, TimeoutError) as error:
            control.cancel()
            log.warning("the gradients were not averaged (%s): going on with this peer's own", error)

    def use_local(self) -> None:
        """There was no round of the run: what the averager has is the best there is."""

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], max_norm: float | None = None) -> Iterator[None]:
        """As of `GradientBuffers`."""
        before = [target.grad for target in targets]
        with self.averager.get_tensors() as averaged:
            gradients = [tensor.to(target, copy=True) for tensor, target in zip(averaged, targets, strict=True)]
        self.averager.notify_used_averaged_gradients()
        if max_norm is not None:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() for gradient in gradients]
            factor = max_norm / (float(torch.stack(norms).square().sum().sqrt()) + 1e-6)
            if factor < 1.0:
                torch._foreach_mul_(gradients, factor)
        try:
            for target, gradient in zip(targets, gradients, strict=True):
                target.grad = gradient
            yield
        finally:
            for target, given in zip(targets, before, strict=True):
                target.grad = given
