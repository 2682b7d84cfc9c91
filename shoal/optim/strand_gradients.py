"""The gradients of a cluster whose ranks carry strands. Each rank accumulates and averages those of its own strands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from shoal.optim._torch import foreach_mul_
from shoal.optim.accumulator import EpochGradients
from shoal.optim.crew import Crew
from shoal.optim.strand_averager import StrandAverager
from shoal.optim.strand_rounds import Strand, StrandRounds


class StrandGradients(StrandRounds):
    """The gradients of the strands that this rank carries. At rank 0, `Epoch` uses them as the gradients of the whole
    cluster, and each call is made at all ranks.

    Args:
        trained: for each strand of this rank, the pieces of parameters that get gradients.
        gradients: the gradients of each strand.
        averagers: the averager of each strand.
        carriers, crew, max_norm: see `StrandRounds`.
    """

    def __init__(
        self,
        trained: Sequence[Sequence[torch.Tensor]],
        gradients: Sequence[EpochGradients],
        averagers: Sequence[StrandAverager],
        carriers: Sequence[int],
        crew: Crew,
        max_norm: float | None,
    ) -> None:
        super().__init__(carriers, crew, max_norm)
        self._trained, self._gradients = trained, gradients
        each = zip(trained, gradients, averagers, strict=True)
        self._strands = [Strand(vector, averager, len(pieces)) for pieces, vector, averager in each]

    @property
    def averagers(self) -> list[StrandAverager]:
        """See `StrandRounds`."""
        return [strand.averager for strand in self._strands]

    @property
    def samples(self) -> float:
        """The number of samples that the cluster has accumulated."""
        return self._gradients[0].samples

    def accumulate(self, batch_size: float) -> None:
        """Add the `.grad` of the pieces, which is the mean over `batch_size` samples of the cluster."""
        self._crew.tell_quietly("accumulate", batch_size)
        for gradients in self._gradients:
            gradients.accumulate(batch_size)

    def reset(self) -> None:
        """Drop the accumulated gradients."""
        self._crew.tell("reset")
        for gradients in self._gradients:
            gradients.reset()

    def close(self, scale: float = 1.0) -> float:
        """Begin the rounds of all strands with the accumulated gradients, unless this epoch has had them.

        Returns:
            The number of samples behind the cluster's gradients; 0 if an element is not finite at any rank.
        """
        if self.held:
            return self._brought_to_rounds
        samples = self.samples
        self._crew.tell("close")
        are_finite = [self.close_here(), *self._crew.hear()]
        samples = samples if all(are_finite) else 0.0
        self._crew.tell("begin", samples)
        self.begin_rounds(samples)
        return samples

    def close_here(self) -> bool:
        """Copy the accumulated gradients for the next rounds. Returns whether all of them are finite."""
        samples = self.samples
        return min([gradients.close() for gradients in self._gradients]) == samples

    def begin_rounds(self, samples: float) -> None:
        """Begin the rounds of this rank. If `samples` is 0, drop the accumulated gradients."""
        for gradients in self._gradients if not samples else ():
            gradients.reset()
        self.begin_here(self._strands, samples)

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], max_norm: float | None = None) -> Iterator[float | None]:
        """Within this context, the `.grad` of this rank's pieces are the averages. Afterwards they are what they
        were. At rank 0 it is a context of the norm that `measure` has noted."""
        with contextlib.ExitStack() as within:
            for pieces, gradients in zip(self._trained, self._gradients, strict=True):
                within.enter_context(gradients.as_grad(pieces))
            if self._factor < 1.0:
                foreach_mul_([piece.grad for piece in targets if piece.grad is not None], self._factor)
            self._controls = None
            yield self._norm
