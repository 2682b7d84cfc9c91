"""A step of a `TrainingStateAverager` that may still be under way."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.control import Gathered, StepControl
from shoal.swarm.protocol.errors import AveragingError

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class StateUpdate:
    """The optimizer's step, and the round after it, as far as each was asked for.

    Attributes:
        work: the optimizer's step and the beginning of the round, if that is done in the background.
        round: averages the state.
        before: what was averaged, where the change since then is to be kept.
        published: whether the model has the parameters that the optimizer's step has made.
    """

    work: Future[None] | None = None
    round: StepControl | None = None
    before: list[torch.Tensor] | None = None
    published: bool = False

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer's step is under way in the background."""
        return self.work is not None and not self.work.done()

    @property
    def is_averaging(self) -> bool:
        """Whether the round is under way."""
        return self.round is not None and not self.round.done()

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return not self.is_stepping and not self.is_averaging

    def wait(self) -> None:
        """Until it is done, however it ends."""
        for future in (self.work, self.round):
            if future is not None:
                _wait(future)

    def cancel(self) -> None:
        """Give the round up: the others must not wait for this peer."""
        if self.round is not None:
            self.round.cancel()

    def result(self) -> Gathered | None:
        """What the round gathered; None if there was none, or if it failed, which is logged. Raises what the work has
        raised, and errors of the round that are not the network's. To be called when it is done."""
        if self.work is not None:
            self.work.result()
        if self.round is None:
            return None
        error = self.round.exception() if not self.round.cancelled() else AveragingError("cancelled")
        if isinstance(error, AveragingError):
            log.warning("the state was not averaged: %s", error)
            return None
        return self.round.result()


def _wait(future: Future[Any]) -> None:
    with contextlib.suppress(CancelledError):
        future.exception()
