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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.remote.calls import RemoteOptimizerError as RemoteOptimizerError
    from shoal.remote.optimizer import DistributedOptimizer as DistributedOptimizer

_HOMES = {"DistributedOptimizer": "shoal.remote.optimizer", "RemoteOptimizerError": "shoal.remote.calls"}
__all__ = ["DistributedOptimizer", "RemoteOptimizerError"]


# A worker imports this room when its first calls come, several threads at the same time and each from another end.
# Imports of a package's own modules in its __init__ would then be circular between threads, which Python resolves by
# showing one of them a half-made module.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.remote' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
