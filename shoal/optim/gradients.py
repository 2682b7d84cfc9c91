"""Gradients of an epoch: averaged over this peer's steps in flat memory, and over all peers when they come back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, grad_of, is_finite

log = logging.getLogger(__name__)


class Gradients(Protocol):
    """What the end of an epoch needs of its gradients; see `GradientBuffers`."""

    @property
    def samples(self) -> float: ...
    def accumulate(self, batch_size: int) -> None: ...
    def reset(self) -> None: ...
    def close(self, scale: float = 1.0) -> float: ...
    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes: ...
    def use_local(self) -> None: ...
    def as_grad(
        self, targets: Sequence[torch.Tensor], max_norm: float | None = None
    ) -> AbstractContextManager[None]: ...


class GradientBuffers:
    """The mean of this peer's gradients in an epoch, weighted by samples, and the average of all peers'.

    The vector that is averaged has one more tensor: per parameter, whether it got a gradient at all. A parameter that
    got none from any peer has no `.grad` in the step, as it would have in one process: neither momentum nor weight
    decay moves it.

    Args:
        parameters: those that get gradients.
        compression: how gradients travel; the flags always exactly.
        apart: accumulate in memory of its own, so that the next epoch can begin while the mean of this one is averaged.
        reuse: accumulate in the parameters' `.grad`, which nobody may clear: they hold the sum over the steps, and each
            step counts alike, whatever its samples.

    Attributes:
        samples: behind what is accumulated.
        codecs, mine, averaged: what a round takes: the codecs of the vector, what this peer brings and what it gets.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], compression: Compression, *, apart: bool = False, reuse: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.samples: float = 0.0
        self._steps = 0
        self._seen: set[int] = set()  # which parameters have got a gradient
        self._warned = False  # that all is zero
        self._reuse = reuse
        devices = {parameter.device.type for parameter in self.parameters}
        flags = torch.zeros(len(self.parameters), dtype=torch.float32, device="cpu")
        self.layout = Layout.of([*self.parameters, flags]).on("cpu")
        self.codecs = plan_codecs(compression, self.layout, TensorRole.GRADIENT, exact=[len(self.parameters)])
        self._mine = FlatBuffer(self.layout, pinned="cuda" in devices)
        self._averaged = FlatBuffer(self.layout)
        self.mine, self.averaged = self._mine.flat, self._averaged.flat
        *self._mean, self._used = self._mine.views()
        *_, self._used_by_any = self._averaged.views()
        # Where gradients are accumulated: beside the parameters; on the host it may be what is sent.
        if reuse:
            self._means = []
        elif devices == {"cpu"} and not apart:
            self._means = self._mean
        else:
            self._means = FlatBuffer(Layout.of(self.parameters)).views()

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Take the parameters' `.grad`, the mean over `batch_size` samples, into the mean of the epoch. A parameter
        without a gradient counts as one with zeros."""
        self.samples += batch_size
        self._steps += 1
        if self._reuse:
            return
        share = batch_size / self.samples
        grads = list(map(grad_of, self.parameters))
        gradients = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
        means, unused = self._means, []
        if len(gradients) < len(grads):
            unused = [mean for mean, grad in zip(means, grads, strict=True) if grad is None]
            means = [mean for mean, grad in zip(means, grads, strict=True) if grad is not None]
        if len(self._seen) < len(grads):
            self._seen |= {index for index, grad in enumerate(grads) if grad is not None}
        first = self._steps == 1  # nothing is left of what was there before
        if means and first:
            torch._foreach_copy_(means, gradients)
        elif means:
            torch._foreach_lerp_(means, gradients, share)
        if unused and first:
            torch._foreach_zero_(unused)
        elif unused:
            torch._foreach_mul_(unused, 1.0 - share)

    def reset(self) -> None:
        """Drop what was accumulated."""
        if self._reuse:
            for parameter in self.parameters:
                parameter.grad = None
        self._seen.clear()
        self.samples, self._steps = 0.0, 0

    @torch.no_grad()
    def close(self, scale: float = 1.0) -> float:
        """Make what was accumulated, divided by `scale`, what this peer brings to the next round; returns how many
        samples are behind it: 0, and zeros, if an element is not finite."""
        if self._reuse:
            self._take_from_grad(scale)
        elif not self._steps:
            torch._foreach_zero_(self._mean)
        elif self._means is not self._mean:
            torch._foreach_copy_(self._mean, self._means)
        used = [float(index in self._seen) for index in range(len(self.parameters))]
        self._used.copy_(torch.tensor(used, device="cpu"))
        if all(is_finite(flat) for flat in self.mine):
            if self.samples and not self._warned and not any(map(_has_values, self._mean)):
                self._warned = True
                log.warning(
                    "all gradients of this peer are zero in an epoch of %g samples: was zero_grad(set_to_none=False) "
                    "called between backward() and step()? They count as they are (this is said once)",
                    self.samples,
                )
            return self.samples
        for flat in self.mine:
            flat.zero_()
        self.reset()
        return 0.0

    def _take_from_grad(self, scale: float) -> None:
        self._seen = {index for index, parameter in enumerate(self.parameters) if parameter.grad is not None}
        if not self._steps:
            self._seen.clear()  # what a step with 0 samples left in `.grad` does not count
        for index, (mean, parameter) in enumerate(zip(self._mean, self.parameters, strict=True)):
            if index in self._seen and parameter.grad is not None:
                mean.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            else:
                mean.zero_()
        torch._foreach_div_(self._mean, max(1, self._steps) * scale)

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Nothing to do before the round of the run, which averages what was closed, and names the average."""
        return b""

    def use_local(self) -> None:
        """Take this peer's own mean for the average: there was no round."""
        for averaged, mine in zip(self.averaged, self.mine, strict=True):
            averaged.copy_(mine)

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], max_norm: float | None = None) -> Iterator[None]:
        """Within, the `.grad` of `targets`, one for each parameter, are a copy of the average, which hooks and kernels
        may change; the average itself is still asked for by those who missed the round. Afterwards `.grad` are what
        they were.

        Args:
            max_norm: if the norm of the average over all parameters is larger, it is scaled down to that.
        """
        before = [target.grad for target in targets]
        used = self._used_by_any.tolist()
        for mine, averaged in zip(self.mine, self.averaged, strict=True):
            mine.copy_(averaged)
        if max_norm is not None:
            self._clip(max_norm)
        try:
            for target, average, weight in zip(targets, self._mean, used, strict=True):
                target.grad = average.to(target.device) if weight > 0 else None
            yield
        finally:
            for target, gradient in zip(targets, before, strict=True):
                target.grad = gradient

    def _clip(self, max_norm: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_`. In float64, so that machines that sum in another order agree on the
        factor."""
        flags = self.layout.entries[-1]
        square = 0.0
        for number, flat in enumerate(self.mine):
            values = flat[: flags.span.start] if number == flags.buffer else flat  # the flags are last
            square += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        factor = max_norm / (square**0.5 + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(self._mean, factor)


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether an element is not zero; as a rule the first part says so."""
    return any(bool(part.any()) for part in torch.split(tensor.view(-1), 1 << 14))


class HeldGradients:
    """Gradients that are accumulated in `.grad`: autograd adds to them in place, so as long as nobody clears one, it
    stays the same tensor.

    Args:
        parameters: whose `.grad` they are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._held: list[torch.Tensor | None] = []

    def hold(self) -> None:
        """From now on each gradient that is there is to stay."""
        self._held = [parameter.grad for parameter in self._parameters]

    def release(self) -> None:
        """They may be cleared now."""
        self._held = []

    def lost(self) -> int | None:
        """The number of a parameter whose gradient was cleared or replaced since `hold`."""
        for index, held in enumerate(self._held):
            now = self._parameters[index].grad
            if held is None or now is held:
                continue
            # Autograd makes a new sum if it has a graph of its own (create_graph=True), and of sparse and dense ones.
            if now is None or not (now.requires_grad or (held.is_sparse and not now.is_sparse)):
                return index
        return None


def lost_gradient(name: str) -> ValueError:
    """What is raised where a gradient is `lost`, given the parameter's name."""
    return ValueError(
        f"reuse_grad_buffers=True accumulates in .grad, and that of {name} was cleared or replaced between two steps "
        "of an epoch (model.zero_grad() does so, and frameworks call it): leave such calls out, or leave "
        "reuse_grad_buffers out"
    )
