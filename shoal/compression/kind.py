"""Codecs that keep values of one kind apart from others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec


@dataclass(frozen=True, slots=True)
class KindCodec(Codec):
    """A codec for values of one kind. It does the same as ``codec``, but is not equal to it.

    So the values of each kind in a chunk are encoded separately, and values of very different sizes share no block and
    no codebook.

    Args:
        codec: the codec that encodes.
        kind: the number of the kind; see :func:`shoal.compression.plan_codecs`.
    """

    codec: Codec
    kind: int

    @property
    def name(self) -> str:  # type: ignore[override]  # depends on the inner codec
        """The name of the codec, a dot, and the number of the kind."""
        return f"{self.codec.name}.{self.kind}"

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        """Whether the codec is lossy."""
        return self.codec.lossy

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The size that the codec gives."""
        return self.codec.encoded_nbytes(numel, dtype)

    def _encode(self, chunk: Tensor) -> memoryview:
        return self.codec.encode(chunk)

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        return self.codec.decode(payload, dtype, numel)
