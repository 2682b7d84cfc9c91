"""The private names of torch that this room uses. No other file of the room uses one. The column "torch has it since"
comes from the sources of torch 2.0.1, 2.4.0 and 2.6.0. Shoal supports 2.6 and later.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_*`` | one operation over many small tensors, as torch.optim's own foreach kernels | 2.0 | importing the room raises AttributeError |
| ``torch._fused_adam_``, ``torch._fused_adamw_`` | the whole update in one call that releases the GIL | 2.0 or before | the class has no fused kernel |
| ``torch._fused_sgd_`` | the same | 2.4, not in 2.0 | the same |
| ``torch._fused_adagrad_`` | the same | 2.4, not in 2.0 | the same |
| ``Tensor._base`` | whether the counters of all tensors are the views of one | 2.0 or before | AttributeError at the first step |
| ``torch._C._dynamo.guards.TensorGuards`` | compares class, dtype, device, shape and strides of all tensors in one call | 2.0 or before | `bound` checks the tensors one by one in every step |
| ``torch.jit._state._get_script_class`` | whether a class was scripted | 2.0 or before | no class counts as scripted: TorchScript is gone |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards as TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_neg = torch._foreach_neg
foreach_sub_ = torch._foreach_sub_

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor of which a tensor is a view; None if it is no view."""


def _missing(*_: Any, **__: Any) -> None:
    raise NotImplementedError(f"torch {torch.__version__} has no such fused kernel")


fused_adagrad_: Callable[..., None] = getattr(torch, "_fused_adagrad_", _missing)
fused_adam_: Callable[..., None] = getattr(torch, "_fused_adam_", _missing)
fused_adamw_: Callable[..., None] = getattr(torch, "_fused_adamw_", _missing)
fused_sgd_: Callable[..., None] = getattr(torch, "_fused_sgd_", _missing)


def guards_of(tensors: Sequence[Tensor]) -> TensorGuards | None:
    """An object that compares other tensors with these by ``check(*tensors)``; None if torch has no such object."""
    if TensorGuards is None:
        return None
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def is_scripted(optimizer: type) -> bool:
    """Whether a class was made by `torch.jit.script`."""
    registered = getattr(torch.jit, "_state", None)  # goes away with TorchScript
    return registered is not None and registered._get_script_class(optimizer) is not None
