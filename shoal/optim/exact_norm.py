"""Computes the norm of tensors with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 1 << 16  # the number of elements that are squared at a time


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The 2-norm over all elements, in float64. torch sums in an order that depends on the processor. This function
    adds the second half of the squares to the first, again and again, so every processor rounds each sum alike."""
    total = 0.0
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        for piece in torch.split(real.reshape(-1), PIECE):
            squares = piece.to("cpu", torch.float64).square()  # not in place: `piece` may be float64 itself
            while squares.numel() > 1:
                half = squares.numel() // 2
                rest = squares[2 * half :]
                squares = squares[:half] + squares[half : 2 * half]
                if rest.numel():
                    squares[0] += rest[0]
            total += float(squares[0]) if squares.numel() else 0.0
    return float(total**0.5)
