"""Operations on all gradients when each is with its owner: clipping by their common norm, and unscaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from shoal.flat import is_finite
from shoal.sharding.communication import Communication
from shoal.sharding.partition import Slice


@torch.no_grad()
def norm_of(
    gradients: Mapping[Slice, Tensor | None],
    norm_type: float,
    communication: Communication,
    params: Sequence[Tensor],
) -> Tensor:
    """The norm of the gradients of all ranks, as of one vector, on the CPU. A collective.

    It equals that of ``torch.nn.utils.get_total_norm`` up to float rounding: this function adds the norm up share by
    share, torch parameter by parameter. So the norm of order 0 is, as in torch, the number of gradients that are not
    zero.

    Args:
        gradients: this rank's.
        norm_type: the order of the norm.
        communication: the ranks.
        params: all parameters. The norm has the widest of their dtypes, at least float32: a rank may hold gradients of
            some dtypes only.
    """
    held = {part: gradient for part, gradient in gradients.items() if gradient is not None and gradient.numel()}
    # Sums of squares overflow 16-bit floats, so the norm is taken in float32 at least; float64 stays float64.
    norms = {
        part: torch.linalg.vector_norm(
            gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32)
        ).double()
        for part, gradient in held.items()
    }
    dtype = reduce(torch.promote_types, {param.dtype for param in params}, torch.float32).to_real()
    if norm_type == 0:  # a parameter counts once, however many ranks hold parts of it
        counts = torch.zeros(len(params), dtype=torch.float64, device="cpu")
        for part, norm in norms.items():
            counts[part.tensor] += norm.cpu()
        return torch.stack(communication.exchange(counts)()).sum(0).count_nonzero().to(dtype)
    # The norm, and whether there is one: that of no gradients would be the smallest of all.
    mine = torch.zeros(2, dtype=torch.float64, device="cpu")
    if norms:
        mine[0] = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms.values()]), norm_type)
        mine[1] = 1
    every = torch.stack(communication.exchange(mine)())
    there = every[every[:, 1] > 0, 0]
    return (torch.linalg.vector_norm(there, norm_type) if there.numel() else torch.zeros(())).to(dtype)


@torch.no_grad()
def scale_to(gradients: Mapping[Slice, Tensor | None], max_norm: float, norm: Tensor) -> None:
    """Scales this rank's gradients, whose norm is that of all ranks, down to ``max_norm``. The factor is equal to the
    bit on all ranks. It is that of ``torch.nn.utils.clip_grads_with_norm_``.
    """
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient in gradients.values():
        if gradient is not None:
            gradient.mul_(factor)


@torch.no_grad()
def unscale(gradients: Mapping[Slice, Tensor | None], factor: float, communication: Communication) -> bool:
    """Multiplies the gradients of all ranks by ``factor``; returns whether all were finite before, on all ranks."""
    held = [gradient for gradient in gradients.values() if gradient is not None]
    finite = torch.tensor([all(is_finite(gradient) for gradient in held)], dtype=torch.float32)
    for gradient in held:
        gradient.mul_(factor)
    return bool(torch.cat(communication.exchange(finite)()).all())
