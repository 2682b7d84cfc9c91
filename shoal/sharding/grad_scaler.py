"""Loss scaling for float16 when each gradient is with its owner only."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sharding import _torch
from shoal.sharding.reduced_gradients import ReducedGradients
from shoal.sharding.zero import ZeroRedundancyOptimizer


class GradScaler(_torch.GradScaler):
    """``torch.amp.GradScaler`` that also works with `ZeroRedundancyOptimizer` and ``reduce_scatter``.

    With ``reduce_scatter`` each gradient is with its owner only, and torch's scaler finds none. Every rank must call
    `unscale_`, `step` and `update` equally often: each call sends one message, and all ranks get the same result. An
    infinity on one rank skips the step on all ranks. With other optimizers it does what torch's scaler does.

    The arguments are those of ``torch.amp.GradScaler``.

    Raises:
        ValueError: by `unscale_` and `step`, if a parameter of a ``reduce_scatter`` optimizer is float16.
        RuntimeError: by `unscale_` and `step`, if a rank was lost. The message names it.
    """

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients on the ranks where they are; sends messages to all ranks."""
        gradients = optimizer.gradient_source if isinstance(optimizer, ZeroRedundancyOptimizer) else None
        if not isinstance(optimizer, ZeroRedundancyOptimizer) or not isinstance(gradients, ReducedGradients):
            return super().unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
        step = optimizer.sharded_step
        if not allow_fp16 and any(param.dtype == torch.float16 for param in step.parameters.params):
            raise ValueError("gradients of float16 parameters cannot be unscaled: keep these in float32 (autocast)")
        with step.failures.named("unscaling gradients"):
            if not gradients.unscale(inv_scale.item()):
                found_inf.fill_(1.0)
        return {found_inf.device: found_inf}
