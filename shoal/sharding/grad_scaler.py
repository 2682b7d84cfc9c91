"""Loss scaling for float16, when gradients are with their owners."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.sharding.reduced_gradients import ReducedGradients
from shoal.sharding.zero import ZeroRedundancyOptimizer


class GradScaler(torch.amp.GradScaler):
    """As ``torch.amp.GradScaler``, which finds no gradients if `ZeroRedundancyOptimizer` reduces them to their owners.

    Every rank must call `unscale_`, `step` and `update` as often: they make one message, and come to the same result.
    An infinity on one rank skips the step on all. With other optimizers it is torch's; arguments are torch's too.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = getattr(optimizer, "_gradients", None)
        if not isinstance(optimizer, ZeroRedundancyOptimizer) or not isinstance(gradients, ReducedGradients):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16 and any(param.dtype == torch.float16 for param in optimizer._all_params):
            raise ValueError("gradients of float16 parameters cannot be unscaled: keep these in float32 (autocast)")
        with optimizer._failures.named("unscaling gradients"):
            if not gradients.unscale(inv_scale.item()):
                found_inf.fill_(1.0)
        return {found_inf.device: found_inf}
