"""Work that accumulates gradients over an epoch, whose averages step the state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from shoal.averaging.exchange import Vector
from shoal.optim.accumulator import lost_gradient, norm_of
from shoal.optim.closures import NotUsed, calls_once, kept_loss, loss_of
from shoal.optim.exact_norm import norm_of as exact_norm_of
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.pieces import Pieces
from shoal.optim.result import StepResult
from shoal.optim.work import Batch, Stepper, Work
from shoal.swarm.protocol.loss import Loss, mean_of

log = logging.getLogger(__name__)


class GradientSum(Protocol):
    """Accumulates the gradients of one part of the state, and has their average afterwards. `average` has all elements
    in few tensors, `averages` one tensor for each parameter. `vectors` are those of the run's rounds."""

    @property
    def samples(self) -> float: ...
    @property
    def average(self) -> Sequence[Tensor]: ...
    @property
    def averages(self) -> Sequence[Tensor]: ...
    @property
    def vectors(self) -> Sequence[Vector]: ...
    def accumulate(self, batch_size: float) -> None: ...
    def lost(self) -> int | None: ...
    def reset(self) -> None: ...
    def freeze(self, scale: float = 1.0) -> bool: ...
    def drop(self) -> None: ...
    def as_grad(self, targets: Sequence[Tensor], factor: float = 1.0) -> AbstractContextManager[None]: ...


class Gradients(Work):
    """The mean of this rank's gradients in an epoch, weighted by samples, and the average of all peers' gradients.

    Args:
        optimizer, pieces: see `Work`.
        sums: accumulate the gradients, one for each part of the state.
        targets: for each part, the tensors that are stepped.
        wrapped: the optimizer that makes the step.
        reuse: whether the gradients are accumulated in `.grad` itself.
        is_exact: whether the norm of the average has the same bits on every machine. Otherwise machines that sum in
            another order agree to rounding, and it takes less time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Pieces,
        sums: Sequence[GradientSum],
        targets: Sequence[Sequence[Tensor]],
        wrapped: Optimizer,
        *,
        reuse: bool = False,
        is_exact: bool = False,
    ) -> None:
        super().__init__(optimizer, pieces)
        self._sums, self._targets, self._is_exact, self.wrapped = sums, targets, is_exact, wrapped
        self.holds_every_batch, self.has_any_threads = reuse, is_exact
        self._scaler: GradScaler | None = None  # the scaler of the gradients that are accumulated in `.grad`
        self._losses: list[tuple[Any, float]] = []  # of the batches with a closure: the loss, and the samples
        self._samples_with_loss = 0.0
        self._reads_loss = not calls_once(type(wrapped))
        self._told_of_losses = False  # whether a warning has told of a closure without a usable loss

    @property
    def samples(self) -> float:
        """See `Work`."""
        return self._sums[0].samples

    def add(self, batch: Batch) -> bool:
        """See `Work`."""
        self._check_held()
        counts = super().add(batch)
        if counts and batch.closure is not None:  # the step is made later
            self._losses.append((kept_loss(batch.closure.returned), batch.samples))
            self._samples_with_loss += batch.samples
        return counts

    def _use(self, batch: Batch) -> None:
        try:
            self._admit(batch.scaler)
        except NotUsed:
            self.skip()
            raise
        for part in self._sums:
            part.accumulate(batch.samples)
        if self.holds_every_batch:
            self._scaler = batch.scaler

    def _check_held(self) -> None:
        if self.holds_every_batch and (index := self._sums[0].lost()) is not None:
            self.reset()
            trained, _ = self._pieces.in_backward
            raise lost_gradient(self._pieces.name_of(trained[index]))

    def skip(self) -> None:
        """See `Work`. Where gradients are accumulated in `.grad`, autograd has added the batch to those of earlier
        steps, so all of them are dropped."""
        if self.holds_every_batch:
            self.reset()

    def reset(self) -> None:
        """See `Work`."""
        if self._losses:
            self._forget_losses()
        for part in self._sums:
            part.reset()
        if self._scaler is not None:
            self._scaler.release(self._optimizer)
            self._scaler = None

    def freeze(self) -> bool:
        """See `Work`."""
        self._check_held()
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        are_finite = min([part.freeze(scale) for part in self._sums])
        self.loss = self._mean_loss() if are_finite else None
        return are_finite

    def drop(self) -> None:
        """See `Work`."""
        self.loss = None
        self._forget_losses()
        for part in self._sums:
            part.drop()

    def _forget_losses(self) -> None:
        self._losses, self._samples_with_loss = [], 0.0

    def _mean_loss(self) -> Loss | None:
        """The mean loss of the accumulated samples; None if some have none."""
        if not self._losses or self._samples_with_loss != self.samples:
            return None
        losses = [(loss_of(loss), weight) for loss, weight in self._losses]
        if self._reads_loss and not self._told_of_losses and any(loss is None for loss, _ in losses):
            self._told_of_losses = True
            log.warning(
                "step(closure): the closure has returned no finite number, so the epoch's step of all peers is made "
                "without a loss; return the loss, a tensor with one element (this is said once)"
            )
        return mean_of(losses)

    def vectors(self, epoch: int) -> Sequence[Vector]:
        """See `Work`."""
        return [vector for part in self._sums for vector in part.vectors]

    @property
    def all_vectors(self) -> Sequence[Sequence[Vector]]:
        """See `Work`."""
        return [self.vectors(0)]

    # -- out of a round

    def norms(self) -> list[float]:
        """See `Work`."""
        return [exact_norm_of(part.averages) if self._is_exact else norm_of(part.average) for part in self._sums]

    def step(self, state: Stepper, result: StepResult) -> None:
        """See `Work`."""
        state.step(self._as_grad(result.factor), result)

    @contextlib.contextmanager
    def _as_grad(self, factor: float) -> Iterator[None]:
        """Within, the `.grad` of the stepped tensors are the averages. Afterwards they are what they were."""
        with contextlib.ExitStack() as within:
            for part, targets in zip(self._sums, self._targets, strict=True):
                within.enter_context(part.as_grad(targets, factor))
            yield
