"""Accumulates gradients over the batches of one peer, in the vector that the peers of a run average."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from shoal.averaging.exchange import Vector
from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, grad_of, is_finite
from shoal.optim._torch import foreach_add_, foreach_copy_, foreach_div_, foreach_lerp_, foreach_mul_, foreach_zero_

log = logging.getLogger(__name__)


class Accumulator:
    """The gradients of this peer since the last `reset`.

    Args:
        parameters: the parameters whose `.grad` are accumulated.
        memory: for each parameter, a tensor that accumulates its gradients. None: `.grad` itself accumulates them,
            because autograd sums them there. Then nobody may clear or replace a `.grad` between two batches.
        keeps_mean: keep the mean over all samples in `memory`. If False, keep a weighted sum of the batches' gradients;
            the weight of a batch is its number of samples divided by that of the first batch.

    Attributes:
        parameters, memory: as given.
        samples: the number of accumulated samples.
        steps: the number of accumulated batches.
        seen: with `keeps_mean`, the numbers of the parameters that got a gradient.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], memory: list[torch.Tensor] | None, *, keeps_mean: bool
    ) -> None:
        self.parameters, self.memory, self._keeps_mean = list(parameters), memory, keeps_mean
        self.samples: float = 0
        self.steps = 0
        self.seen: set[int] = set()
        self._first: float = 0  # the samples of the first batch
        self._held: list[torch.Tensor | None] = []  # the gradients that have to stay in `.grad`

    def add(self, batch_size: float) -> None:
        """Add the parameters' `.grad`, the mean over `batch_size` samples. A missing gradient counts as zeros. Callers
        are in `torch.no_grad`, which would take 4 % of a step here."""
        is_first = not self.steps  # the first batch overwrites `memory`
        self._first = batch_size if is_first else self._first
        self.samples += batch_size
        self.steps += 1
        if self.memory is None:
            self._held = [parameter.grad for parameter in self.parameters]
            return
        grads = list(map(grad_of, self.parameters))
        gradients = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
        used, unused = self.memory, []
        if len(gradients) < len(grads):
            unused = [memory for memory, grad in zip(self.memory, grads, strict=True) if grad is None]
            used = [memory for memory, grad in zip(self.memory, grads, strict=True) if grad is not None]
        if self._keeps_mean:
            if len(self.seen) < len(grads):
                self.seen |= {index for index, grad in enumerate(grads) if grad is not None}
            share = 1.0 if is_first else batch_size / self.samples
            if used:
                foreach_copy_(used, gradients) if share == 1.0 else foreach_lerp_(used, gradients, share)
            if unused:
                foreach_zero_(unused) if share == 1.0 else foreach_mul_(unused, 1.0 - share)
        elif used:
            moved = [gradient.to(memory.device) for gradient, memory in zip(gradients, used, strict=True)]
            foreach_add_(used, moved, alpha=batch_size / self._first)

    @property
    def batches(self) -> float:
        """The sum of the batches' weights: the samples divided by those of the first batch. If `.grad` accumulates, the
        number of steps."""
        return self.steps if self.memory is None or not self._first else self.samples / self._first

    def reset(self) -> None:
        """Drop the gradients and the count of samples. After that, `.grad` may be cleared."""
        self._held = []
        self.seen.clear()
        self.samples, self.steps, self._first = 0, 0, 0
        if self.memory is not None and not self._keeps_mean:
            foreach_zero_(self.memory)

    def lost(self) -> int | None:
        """The number of a parameter whose accumulated `.grad` was cleared or replaced since the last `add`; None if
        there is none."""
        for index, held in enumerate(self._held):
            now = self.parameters[index].grad
            if held is None or now is held:
                continue
            # Autograd itself makes a new tensor if the sum has a graph (create_graph=True), or if it adds sparse and
            # dense gradients.
            if now is None or not (now.requires_grad or (held.is_sparse and not now.is_sparse)):
                return index
        return None


def lost_gradient(name: str) -> ValueError:
    """Make the error for a gradient that is `lost`, given the parameter's name."""
    return ValueError(
        f"reuse_grad_buffers=True accumulates in .grad, and that of {name} was cleared or replaced between two steps "
        "of an epoch (model.zero_grad() does so, and frameworks call it): leave such calls out, or leave "
        "reuse_grad_buffers out"
    )


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The 2-norm over all elements, summed in float64, so that machines that sum in another order agree to rounding."""
    norms = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in tensors]
    return float(sum(norm**2 for norm in norms) ** 0.5)


def factor_of(norm: float, max_norm: float) -> float:
    """The factor by which gradients of this norm are multiplied, as `torch.nn.utils.clip_grad_norm_` does, so that
    their norm is at most `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))


class EpochGradients(Vector):
    """The mean of this peer's gradients in an epoch, weighted by samples, and the average of all peers' gradients.

    The vector that peers average has one more tensor of flags, which say for each parameter whether it got a gradient.
    A parameter that got no gradient on any peer has no `.grad` in the step, as in training with one process: neither
    momentum nor weight decay moves it.

    Args:
        parameters: the parameters that get gradients.
        compression: the codec of the gradients in a round. The flags are always sent exactly.
        apart: accumulate in memory of its own, so that the next epoch can begin while peers average this one.
        reuse: accumulate in the parameters' `.grad`. They hold the sum over the steps, and all steps have the same
            weight, whatever their samples.
        error_feedback: see `Vector`.

    Attributes:
        accumulator: accumulates this peer's gradients.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        compression: Compression,
        *,
        apart: bool = False,
        reuse: bool = False,
        error_feedback: float | None = None,
    ) -> None:
        self._warned = False  # whether a warning has said that all gradients are zero
        devices = {parameter.device.type for parameter in parameters}
        flags = torch.zeros(len(parameters), dtype=torch.float32, device="cpu")
        layout = Layout.of([*parameters, flags]).on("cpu")
        codecs = plan_codecs(compression, layout, TensorRole.GRADIENT, exact=[len(parameters)])
        super().__init__(layout, codecs, pinned="cuda" in devices, error_feedback=error_feedback)
        *self._mean, self._used = self.inputs.views()
        *_, self._used_by_any = self.outputs.views()
        # Gradients accumulate on the parameters' devices. On the host, they may accumulate in the memory that is sent.
        in_place = devices == {"cpu"} and not apart
        memory = None if reuse else self._mean if in_place else FlatBuffer(Layout.of(parameters)).views()
        self.accumulator = Accumulator(parameters, memory, keeps_mean=True)

    @property
    def samples(self) -> float:
        """The number of accumulated samples."""
        return float(self.accumulator.samples)

    def accumulate(self, batch_size: float) -> None:
        """Add the parameters' `.grad`, the mean over `batch_size` samples."""
        self.accumulator.add(batch_size)

    def lost(self) -> int | None:
        """See `Accumulator.lost`."""
        return self.accumulator.lost()

    def reset(self) -> None:
        """Drop what was accumulated."""
        if self.accumulator.memory is None:
            for parameter in self.accumulator.parameters:
                parameter.grad = None
        self.accumulator.reset()

    @torch.no_grad()
    def freeze(self, scale: float = 1.0) -> bool:
        """Copy the mean of the accumulated gradients, divided by `scale`, for the next round. Returns whether all
        elements are finite."""
        samples, accumulator = self.samples, self.accumulator
        if accumulator.memory is None:
            self._take_from_grad(scale)
        elif not accumulator.steps:
            foreach_zero_(self._mean)
        elif accumulator.memory is not self._mean:
            foreach_copy_(self._mean, accumulator.memory)
        used = [float(index in accumulator.seen) for index in range(len(accumulator.parameters))]
        self._used.copy_(torch.tensor(used, device="cpu"))
        if not all(is_finite(flat) for flat in self.inputs.flat):
            return False
        if samples and not self._warned and not any(map(_has_values, self._mean)):
            self._warned = True
            log.warning(
                "all gradients of this peer are zero in an epoch of %g samples: was zero_grad(set_to_none=False) "
                "called between backward() and step()? They count as they are (this is said once)",
                samples,
            )
        return True

    def drop(self) -> None:
        """Drop what was accumulated, and bring zeros to the next round."""
        foreach_zero_(self.inputs.flat)
        self.reset()

    def _take_from_grad(self, scale: float) -> None:
        accumulator, seen = self.accumulator, set[int]()
        for index, (mean, parameter) in enumerate(zip(self._mean, accumulator.parameters, strict=True)):
            # Without steps, the gradients in `.grad` are from steps with 0 samples and do not count.
            if parameter.grad is not None and accumulator.steps:
                seen.add(index)
                mean.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            else:
                mean.zero_()
        accumulator.seen = seen
        foreach_div_(self._mean, max(1, accumulator.steps) * scale)

    @property
    def average(self) -> list[torch.Tensor]:
        """The average, without the flags, in few tensors: its norm is faster to compute from these."""
        flags, whole = self.layout.entries[-1], enumerate(self.outputs.flat)  # the flags are at the end of their buffer
        return [flat[: flags.span.start] if number == flags.buffer else flat for number, flat in whole]

    @property
    def vectors(self) -> list[Vector]:
        """The vectors that the run's round averages."""
        return [self]

    @property
    def averages(self) -> list[torch.Tensor]:
        """The average of each parameter's gradient."""
        return self.outputs.views()[:-1]

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], factor: float = 1.0) -> Iterator[None]:
        """Within this context, the `.grad` of `targets` are a copy of the average. Afterwards they are what they were.

        Hooks and kernels may change the copy. The average itself stays, for peers that have missed the round.

        Args:
            targets: one tensor for each parameter.
            factor: by which the copy is multiplied.
        """
        used = self._used_by_any.tolist()
        foreach_copy_(self.inputs.flat, self.outputs.flat)
        if factor < 1.0:
            foreach_mul_(self._mean, factor)
        given = zip(self._mean, targets, used, strict=True)
        with in_grad(targets, [mean.to(target.device) if weight > 0 else None for mean, target, weight in given]):
            yield


@contextlib.contextmanager
def in_grad(targets: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Within this context, the `.grad` of `targets` are these gradients. Afterwards they are what they were."""
    before = [target.grad for target in targets]
    try:
        for target, gradient in zip(targets, gradients, strict=True):
            target.grad = gradient
        yield
    finally:
        for target, gradient in zip(targets, before, strict=True):
            target.grad = gradient


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether any element is not zero. Usually the first part of the tensor has such an element."""
    return any(bool(part.any()) for part in torch.split(tensor.view(-1), 1 << 14))
