"""Work that steps the wrapped optimizer with this peer's own gradients at once (`use_local_updates`)."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from shoal.optim.closures import Closure
from shoal.optim.pieces import Pieces
from shoal.optim.result import StepResult
from shoal.optim.work import Batch, Stepper, Work


class LocalSteps(Work):
    """Steps that this peer makes with its own gradients. At the end of an epoch the peers average the state itself, so
    this brings only the number of samples behind it.

    Args:
        optimizer, pieces: see `Work`.
        wrapped: the optimizer that the user has given.
        make: makes a step of it, given the closure of the batch, or None.
    """

    steps_at_once, shares_state = True, False

    def __init__(
        self, optimizer: Optimizer, pieces: Pieces, wrapped: Optimizer, make: Callable[[Closure | None], None]
    ) -> None:
        super().__init__(optimizer, pieces)
        self.wrapped, self._make, self._samples = wrapped, make, 0.0

    @property
    def samples(self) -> float:
        """See `Work`."""
        return self._samples

    def _use(self, batch: Batch) -> None:
        self._admit(batch.scaler)
        self._pieces.check_groups()
        self._make(batch.closure)
        self._samples += batch.samples

    def freeze(self) -> bool:
        """See `Work`."""
        return True

    def reset(self) -> None:
        """See `Work`. The steps that were made stay."""
        self._samples = 0.0

    def step(self, state: Stepper, result: StepResult) -> None:
        """See `Work`."""
        state.take_average(result)
