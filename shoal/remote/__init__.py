"""The optimizer where the parameters live: model-parallel training over `torch.distributed.rpc`.

What this room promises, to whoever trains with distributed autograd:

* :class:`DistributedOptimizer` has torch's constructor and ``step(context_id)``, so a script changes its import;
* every call of ``step`` is applied exactly once and whole on each worker, one after another, and each from its own
  context's gradients, however many trainers and threads call; ``.grad`` is never used;
* parameters stay where they are, in the memory that they have;
* an error says on which worker it happened, and no call is left half-waited for.

It stands on `shoal.functional`, whose one call per step releases the GIL, and knows nothing of swarms. Its wire is
torch's RPC, which pickles: who can connect to a worker can run code on it. Workers belong into a network of their own.
"""

from __future__ import annotations

from shoal.functional import functional_optim_map, register_functional_optimizer
from shoal.remote.calls import RemoteOptimizerError
from shoal.remote.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "RemoteOptimizerError", "functional_optim_map", "register_functional_optimizer"]
