"""Training on the ranks of one `torch.distributed` process group: sharded optimizer state, and inputs that differ.

What this room promises, to scripts that use torch's own (`ZeroRedundancyOptimizer`, `Join`) and change one import:

* the same names, arguments and collectives of the public protocols, so that its objects work with torch's and torch's
  with them;
* what all ranks hold is equal to the bit, on every rank, after every step and after the last;
* it starts no process and no socket: everything goes through the process group that the caller made, within that
  group's timeout. One thread, with ``reduce_scatter`` on gloo. It imports torch, ``flat`` and ``functional``.
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
