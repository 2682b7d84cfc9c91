"""The private names of torch that this room uses. No other file of the room is to reach for one.

"torch has it since" was read from the sources of torch 2.0.1, 2.4.0 and 2.6.0; Shoal supports 2.6 and later.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_*`` | one operation over many small gradients | 2.0, ``copy_`` 2.4 | importing the room raises AttributeError |
| ``Optimizer._opt_called`` | schedulers warn if the optimizer has made no step before them | 2.4, not in 2.0 | it is only set: schedulers may warn |
| ``LRScheduler._step_count`` | how many steps a scheduler has made | 2.0 or before | AttributeError when an `EpochScheduler` steps |
| ``Tensor._version`` | whether somebody has written to a tensor | 2.0 or before | AttributeError at the first step |
| ``batchnorm._NormBase`` | the class of all modules with running statistics | 2.0 or before | importing the room raises ImportError |
| ``grad_scaler._refresh_per_optimizer_state`` | the state of a scaler for one optimizer, as new | 2.0 or before | importing the room raises ImportError |
| ``GradScaler._per_optimizer_states``, ``GradScaler._scale``, ``GradScaler._check_inf_per_device``, ``GradScaler._check_scale_growth_tracker``, ``GradScaler._unscale_grads_`` | to unscale the averaged gradients, and to skip the step on all peers | 2.0 or before | AttributeError at the scaler's first step |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

NormBase = _NormBase
refresh_per_optimizer_state = _refresh_per_optimizer_state

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to."""


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Says to schedulers that the optimizer has made a step."""
    vars(optimizer)["_opt_called"] = True
