"""Optimizers as values: pure in-place updates of tensors that others own, without `Optimizer` objects."""

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
    "register_functional_optim",
    "register_functional_optimizer",
]
