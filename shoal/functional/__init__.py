"""Functional optimizers: pure in-place updates of tensors that others own, without `Optimizer` objects.

This room promises, to ``remote`` and to users who write their own loops:

* A :class:`FunctionalOptimizer` is a value. It holds options only, and never a tensor of a model or of its state. Any
number of threads may use one value at once, as long as each call has its own parameters and state.
* ``step(params, grads, state)`` gives torch.optim's numbers. With the same kernel on the same shapes they are equal to
the bit, for every option of the torch class. One flat tensor of float32 or float64 in place of many gives the same bits
too, except with the fused SGD, Adam and AdamW on CPUs: their kernels round the ends of tensors differently from the
rest. There, after 100 steps with the same gradients, no element differs by more than 2 units in the last place of the
largest parameter.
* With a fused kernel the whole update is one call that releases the GIL. Nothing needs TorchScript.
* Before a fused kernel is used, it is tried once for each class, dtype and device. Some are missing in torch, and one
is wrong: SGD with momentum on CPUs leaves 16-bit parameters unchanged.
* :data:`functional_optim_map` maps optimizer classes to functional classes. Users register their own, in Shoal's form
or in that of PyTorch's recipe. :func:`bind` gives both forms the same interface.

Importing this room loads torch. The only state that it keeps is the map and the results of the kernel trials.
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
