"""Optimizers as values: pure in-place updates of tensors that others own, without `Optimizer` objects.

What this room promises, to ``remote`` and to users who write their own loops:

* a :class:`FunctionalOptimizer` holds options only, never a tensor of a model or of its state; one value can be used
  from any number of threads at once, as long as each call has its own parameters and state;
* ``step(params, grads, state)`` gives torch.optim's numbers. With the same kernel on the same shapes it is the same to
  the bit, for every option of the torch class. One flat tensor of float32 or float64 in the place of many gives the
  same bits too, but for the fused SGD, Adam and AdamW on CPUs, whose kernels round the ends of tensors differently from
  the rest: there, after 100 steps with the same gradients, no element differs by more than 2 units in the last place of
  the largest parameter;
* with a fused kernel the whole update is one call that releases the GIL; nothing needs TorchScript;
* a fused kernel is tried once for each class, dtype and device before it is used: torch has some that are missing, and
  one that is wrong (SGD with momentum of 16-bit parameters on CPUs, which leaves them as they are);
* :data:`functional_optim_map` says which functional class stands for which optimizer class; users register their own,
  in this form or in that of PyTorch's recipe, and :func:`bind` makes both look alike.

Importing it loads torch and keeps no state but the map and the kernels that were tried.
"""

from __future__ import annotations

from shoal.functional.adadelta import Adadelta
from shoal.functional.adagrad import Adagrad
from shoal.functional.adam import Adam, AdamW
from shoal.functional.adamax import Adamax
from shoal.functional.asgd import ASGD
from shoal.functional.base import FunctionalOptimizer, State, StateEntry
from shoal.functional.bound import BoundOptimizer
from shoal.functional.kernels import Kernel
from shoal.functional.nadam import NAdam
from shoal.functional.qhm import QHM
from shoal.functional.radam import RAdam
from shoal.functional.registry import (
    bind,
    functional_optim_map,
    refuse_functional_form,
    register_functional_optim,
    register_functional_optimizer,
)
from shoal.functional.rmsprop import RMSprop
from shoal.functional.rprop import Rprop
from shoal.functional.sgd import SGD

__all__ = [
    "ASGD",
    "QHM",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "BoundOptimizer",
    "FunctionalOptimizer",
    "Kernel",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "State",
    "StateEntry",
    "bind",
    "functional_optim_map",
    "refuse_functional_form",
    "register_functional_optim",
    "register_functional_optimizer",
]
