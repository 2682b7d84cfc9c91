"""The optimizer for remote parameters: model-parallel training over `torch.distributed.rpc`.

This room promises to scripts that train with distributed autograd:

* :class:`DistributedOptimizer` has torch's constructor and ``step(context_id)``, so a script only changes its import.
* Each worker applies every call of ``step`` exactly once and whole, one after another, and each from the gradients of
its own context, however many trainers and threads call. ``.grad`` is never used.
* Parameters stay on their worker, in the memory that they have.
* An error says on which worker it happened, and no call returns before all workers have answered or timed out.

It builds on `shoal.functional`, whose one call per step releases the GIL, and knows nothing of swarms. It communicates
by torch's RPC, which uses pickle: anyone who can connect to a worker can run code on it. Keep workers in a private
network.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.remote.calls import RemoteOptimizerError as RemoteOptimizerError
    from shoal.remote.optimizer import DistributedOptimizer as DistributedOptimizer

_HOMES = {"DistributedOptimizer": "shoal.remote.optimizer", "RemoteOptimizerError": "shoal.remote.calls"}
__all__ = ["DistributedOptimizer", "RemoteOptimizerError"]


# A worker imports this room when its first calls come, on several threads at the same time, and each thread may begin
# with another module. If `__init__` imported the package's own modules, these imports would be circular between
# threads, and Python resolves that by showing one thread a half-made module.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.remote' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
