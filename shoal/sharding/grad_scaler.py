"""Loss scaling for float16, when gradients are with their owners."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sharding import _torch
from shoal.sharding.reduced_gradients import ReducedGradients
from shoal.sharding.zero import ZeroRedundancyOptimizer


class GradScaler(_torch.GradScaler):
    """As ``torch.amp.GradScaler``, which finds no gradients if `ZeroRedundancyOptimizer` reduces them to their owners.

    Every rank must call `unscale_`, `step` and `update` equally often: each makes one message, and all ranks come to
    the same result. An infinity on one rank skips the step on all. With other optimizers it does what torch's does. The
    arguments are torch's.
    """

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales gradients where they are; messages go to all ranks."""
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
