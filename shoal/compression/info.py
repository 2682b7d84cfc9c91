"""The properties of a tensor by which a codec can be chosen."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch


class TensorRole(enum.Enum):
    """The role of a tensor in training."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    """A statistic of the optimizer."""
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """The properties of a tensor by which a codec is chosen.

    Attributes:
        key: its name or position, as in :class:`~shoal.compression.PerTensorCompression`.
        shape: its shape.
        dtype: the dtype of its elements.
        role: its role in training. Default: unspecified.
        kind: the kind of its values, among tensors of its role, for example the name of a statistic. Default: "".
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
        """The properties of ``tensor``, with this key, role and kind."""
        return CompressionInfo(key, tuple(tensor.shape), tensor.dtype, role, kind)

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)
