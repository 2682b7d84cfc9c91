"""What a choice of codec can depend on."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch


class TensorRole(enum.Enum):
    """What a tensor is to the training."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    """A statistic of the optimizer."""
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """A tensor as a choice of codec sees it.

    Attributes:
        key: its name or position, as in :class:`~shoal.compression.PerTensorCompression`.
        shape: its shape.
        dtype: of its elements.
        role: what it is to the training.
        kind: of its values, among those of its role: the name of a statistic, for example.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: TensorRole = TensorRole.UNSPECIFIED
    kind: str = ""

    @staticmethod
    def from_tensor(
        tensor: torch.Tensor, key: str | int = 0, role: TensorRole = TensorRole.UNSPECIFIED, kind: str = ""
    ) -> CompressionInfo:
        """What there is to know of a tensor."""
        return CompressionInfo(key, tuple(tensor.shape), tensor.dtype, role, kind)

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)
