"""Operations on all gradients when each is with its owner: clipping by their common norm, and unscaling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.flat import is_finite
from shoal.sharding.communication import Communication
from shoal.sharding.partition import Slice


@torch.no_grad()
def clip(
    gradients: Mapping[Slice, Tensor | None],
    max_norm: float,
    norm_type: float,
    communication: Communication,
    dtype: torch.dtype,
) -> Tensor:
    """Scales the gradients of all ranks so that their common norm is at most ``max_norm``; returns the norm before.

    The norm has the dtype ``dtype``. It must be equal on all ranks, and a rank may hold gradients of some dtypes only,
    so the caller gives it.

    The scaling factor is equal to the bit on all ranks. It equals that of ``torch.nn.utils.clip_grad_norm_`` up to
    float rounding: this function adds the norm up share by share, torch parameter by parameter.
    """
    held = [gradient for gradient in gradients.values() if gradient is not None]
    # Sums of squares overflow 16-bit floats, so the norm is taken in float32 at least; float64 stays float64.
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32)).double()
        for gradient in held
    ]
    mine = torch.zeros((), dtype=torch.float64, device="cpu")
    if norms:
        mine = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]), norm_type)
    every = torch.cat(communication.exchange(mine.reshape(1))())
    norm: Tensor = torch.linalg.vector_norm(every, norm_type).to(dtype)
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient in held:
        gradient.mul_(factor)
    return norm


@torch.no_grad()
def unscale(gradients: Mapping[Slice, Tensor | None], factor: float, communication: Communication) -> bool:
    """Multiplies the gradients of all ranks by ``factor``; returns whether all were finite before, on all ranks."""
    held = [gradient for gradient in gradients.values() if gradient is not None]
    finite = torch.tensor([all(is_finite(gradient) for gradient in held)], dtype=torch.float32)
    for gradient in held:
        gradient.mul_(factor)
    return bool(torch.cat(communication.exchange(finite)()).all())
