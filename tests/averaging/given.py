"""Vectors of tests, whose memory the test gives."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from shoal.averaging.residual import Residual
from shoal.compression import CodecPlan


def given(
    mine: torch.Tensor, average: torch.Tensor, codecs: CodecPlan, residuals: Sequence[Residual | None] = (None,)
) -> list[Any]:
    """A vector of one buffer with these inputs and outputs, as the only one of an `Exchange`."""
    inputs, outputs = SimpleNamespace(flat=[mine]), SimpleNamespace(flat=[average])
    return [
        SimpleNamespace(inputs=inputs, outputs=outputs, codecs=codecs, residuals=residuals, opened=lambda errors: None)
    ]
