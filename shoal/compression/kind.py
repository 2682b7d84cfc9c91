"""Values of one kind among others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import Codec


@dataclass(frozen=True, slots=True)
class KindCodec(Codec):
    """A codec for values of one kind. It does what the codec does, but is not equal to it: so the values of each kind
    in a chunk are encoded by themselves, and those of quite different size share no block and no codebook.

    Args:
        codec: which encodes.
        kind: the number of the kind; see :func:`shoal.compression.plan_codecs`.
    """

    codec: Codec
    kind: int

    @property
    def name(self) -> str:  # type: ignore[override]  # of the codec that it holds
        """That of the codec, a point, and the number of the kind."""
        return f"{self.codec.name}.{self.kind}"

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        """As the codec."""
        return self.codec.lossy

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """As the codec."""
        return self.codec.encoded_nbytes(numel, dtype)

    def _encode(self, chunk: Tensor) -> memoryview:
        return self.codec.encode(chunk)

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        return self.codec.decode(payload, dtype, numel)
