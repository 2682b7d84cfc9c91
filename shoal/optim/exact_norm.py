"""The norm of tensors, with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 1 << 16  # elements that are squared at a time


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The 2-norm over all elements, in float64. torch's own sums in an order that depends on the processor; here halves
    are added to halves, each sum rounded once."""
    total = 0.0
    for tensor in tensors:
        for piece in torch.split(tensor.detach().reshape(-1), PIECE):
            squares = piece.to("cpu", torch.float64).square_()
            while squares.numel() > 1:
                half = squares.numel() // 2
                rest = squares[2 * half :]
                squares = squares[:half] + squares[half : 2 * half]
                if rest.numel():
                    squares[0] += rest[0]
            total += float(squares[0]) if squares.numel() else 0.0
    return float(total**0.5)
