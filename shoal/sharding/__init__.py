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

from shoal.sharding.grad_scaler import GradScaler
from shoal.sharding.join import Join, Joinable, JoinHook
from shoal.sharding.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from shoal.sharding.zero import ZeroRedundancyOptimizer

__all__ = [
    "GradScaler",
    "Join",
    "JoinHook",
    "Joinable",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
