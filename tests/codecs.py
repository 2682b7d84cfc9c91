"""The codecs of buffers that tests make without a layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.compression import Codec, CodecPlan, CodecSpan, NoCompression


def codecs_of(buffers: Sequence[torch.Tensor], codec: Codec | None = None) -> CodecPlan:
    """One codec for all elements; by default none is compressed."""
    spans = [CodecSpan(i, 0, len(buffer), codec or NoCompression()) for i, buffer in enumerate(buffers) if len(buffer)]
    return CodecPlan(tuple(spans), len(buffers))
