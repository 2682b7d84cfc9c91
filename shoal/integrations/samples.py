"""How many samples are behind a step, where a framework accumulates gradients over several batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.integrations.ranks import LaunchedRanks


class Samples:
    """Counts the samples of the batches since the last step, and makes the step's gradient the mean over them.

    Lightning and Accelerate divide the loss of each batch by the number of batches that a step should have. That is the
    mean over the samples only if all batches are of one size and none is missing, which the last ones of a pass over
    the data are not. So the loss of each batch is weighted by its size, and the sum is divided by the size of all. In a
    cluster that is the size of all ranks' batches: the gradient is the mean of the ranks' by then.

    Args:
        ranks: that are this peer together. All of them make each call at once.

    Attributes:
        size: the number of samples in the present batch; 0 once it was counted.
        batches: how many batches were counted since the last step.
    """

    def __init__(self, ranks: LaunchedRanks) -> None:
        self._ranks, self._unit = ranks, 0  # the size of a batch whose loss has the weight 1.0
        self.size = 0
        self.forget()

    def forget(self) -> None:
        """Count no batch that came before: its gradients were cleared."""
        self._total = self.batches = 0
        if self._ranks.size == 1:
            self._unit = 0

    def weight(self) -> float:
        """Count the present batch; returns the factor for its loss: 1.0 where all are of one size.

        Raises:
            ValueError: if nobody has said how large it is, or if it was counted.
        """
        size, self.size = self.size, 0
        if not size:
            raise ValueError(
                "nobody knows how many samples are behind this backward(): call it once for each batch of the data "
                "loader that swarm() has returned"
            )
        self._unit = self._unit or self._ranks.of_first(size)
        self._total += size
        self.batches += 1
        return size / self._unit

    @torch.no_grad()
    def finish(self, parameters: Iterable[torch.Tensor], batches: int) -> int:
        """End the step: `.grad` of the parameters becomes the mean over all samples of its batches.

        Args:
            batches: by which the framework has divided each loss.

        Returns:
            The number of samples, in this process.
        """
        mine, total = self._total, self._ranks.total(self._total)
        if total and (factor := self._ranks.size * batches * self._unit / total) != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.forget()
        return mine


def size_of(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor that has one; 0 if there is none. Accelerate's
    `find_batch_size` raises where a batch has text or numbers as well."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next(filter(None, map(size_of, parts)), 0)
