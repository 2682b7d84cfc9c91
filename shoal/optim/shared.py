"""Tensors of one peer's state that the peers of a run average: parameters, optimizer statistics, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from blake3 import blake3

from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, bytes_of


class SharedTensors:
    """What a round takes of such tensors: a copy of what they were when they were taken, and their average. Both are
    allocated at the first round that averages them.

    Args:
        layout: of the tensors, on the CPU.
        compression: how they travel.
        roles: of each tensor.
        kinds: of each tensor, among those of its role; None: all are of one.
    """

    def __init__(
        self,
        layout: Layout,
        compression: Compression,
        roles: Sequence[TensorRole],
        kinds: Sequence[str] | None = None,
    ) -> None:
        self.layout, self._roles = layout, tuple(roles)
        self.codecs = plan_codecs(compression, layout, roles, kinds=kinds)

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
            keep_changes: add what has changed in them since they were taken, where that is finite. No statistic
                becomes negative by that.
        """
        views = zip(tensors, self._average.views(), self._mine.views(), self._roles, strict=True)
        for tensor, average, mine, role in views:
            if tensor is None:
                continue
            if keep_changes:
                now = tensor.detach().to("cpu", copy=True)
                moved = average + (now - mine).nan_to_num_(0.0, 0.0, 0.0)
                tensor.copy_(kept_positive(moved, average, now) if role is TensorRole.OPTIMIZER else moved)
            else:
                tensor.copy_(average)

    def digest(self) -> bytes:
        """The blake3 hash of the average, 32 bytes."""
        hasher = blake3()
        for flat in self.averaged:
            hasher.update(bytes_of(flat))
        return hasher.digest()


def kept_positive(moved: torch.Tensor, average: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """`moved`, an average of a statistic plus what has changed in it since: nowhere less than both the average and what
    the statistic is now, if neither has a negative value. (What has decayed here may be more than the average is. An
    optimizer that divides by the root makes NaN of a negative second moment.)"""
    if not ((average >= 0).all() and (now >= 0).all()):
        return moved
    return torch.maximum(moved, torch.minimum(average, now))
