"""Training on the ranks of one `torch.distributed` process group: sharded optimizer state, and uneven inputs.

This room promises, to scripts that use torch's own classes (`ZeroRedundancyOptimizer`, `Join`) and change one import:

* Its public classes have the same names and arguments and use the same collectives as torch's. So its objects work with
torch's, and torch's with them.
* All ranks hold the same parameters, equal to the bit, after every step.
* It starts no process and no socket. All messages go through the process group that the caller made, within that
group's timeout. It starts one thread with ``reduce_scatter`` on gloo, and none otherwise. It imports torch, ``flat``
and ``functional``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.sharding.grad_scaler import GradScaler as GradScaler
    from shoal.sharding.join import Join as Join
    from shoal.sharding.join import Joinable as Joinable
    from shoal.sharding.join import JoinHook as JoinHook
    from shoal.sharding.overlap import hook_with_zero_step as hook_with_zero_step
    from shoal.sharding.overlap import hook_with_zero_step_interleaved as hook_with_zero_step_interleaved
    from shoal.sharding.zero import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer

_HOMES = {
    "GradScaler": "grad_scaler",
    "Join": "join",
    "JoinHook": "join",
    "Joinable": "join",
    "ZeroRedundancyOptimizer": "zero",
    "hook_with_zero_step": "overlap",
    "hook_with_zero_step_interleaved": "overlap",
}
__all__ = [
    "GradScaler",
    "Join",
    "JoinHook",
    "Joinable",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]


def __getattr__(name: str) -> Any:
    # Imported when first used, like all public names of Shoal: an `Optimizer` needs two small files of this room.
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.sharding' has no attribute {name!r}")
    return getattr(import_module(f"shoal.sharding.{_HOMES[name]}"), name)
