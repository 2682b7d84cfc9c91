"""Tensors of one peer's state that the peers of a run average: parameters, optimizer statistics, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from blake3 import blake3

from shoal.compression import Compression, TensorRole
from shoal.flat import FlatBuffer, Layout, bytes_of


class SharedTensors:
    """What a round takes of such tensors: a copy of what they were when they were taken, and their average. Both are
    allocated at the first round that averages them.

    Args:
        layout: of the tensors, on the CPU.
        compression: how they travel.
        roles: of each tensor.
    """

    def __init__(self, layout: Layout, compression: Compression, roles: Sequence[TensorRole]) -> None:
        self.layout = layout
        self.codecs = compression.plan(layout, roles)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each flat buffer."""
        return tuple(spec.numel for spec in self.layout.buffers)

    @cached_property
    def _mine(self) -> FlatBuffer:
        return FlatBuffer(self.layout)

    @cached_property
    def _average(self) -> FlatBuffer:
        return FlatBuffer(self.layout)

    @property
    def mine(self) -> list[torch.Tensor]:
        """What this peer brings, flat."""
        return self._mine.flat

    @property
    def averaged(self) -> list[torch.Tensor]:
        """What all get, flat."""
        return self._average.flat

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy what the tensors are now; one that this peer does not have counts as zeros."""
        for mine, tensor in zip(self._mine.views(), tensors, strict=True):
            mine.zero_() if tensor is None else mine.copy_(tensor)

    @torch.no_grad()
    def put(self, tensors: Sequence[torch.Tensor | None], *, keep_changes: bool) -> None:
        """Set the tensors to their average.

        Args:
            keep_changes: add what has changed in them since they were taken, where that is finite.
        """
        for tensor, average, mine in zip(tensors, self._average.views(), self._mine.views(), strict=True):
            if tensor is None:
                continue
            if keep_changes:
                change = tensor.detach().to("cpu", copy=True).sub_(mine)
                tensor.copy_(average + change.nan_to_num_(0.0, 0.0, 0.0))
            else:
                tensor.copy_(average)

    def digest(self) -> bytes:
        """The blake3 hash of the average, 32 bytes."""
        hasher = blake3()
        for flat in self.averaged:
            hasher.update(bytes_of(flat))
        return hasher.digest()
