"""Optimizers as values: pure in-place updates of tensors that others own, without `Optimizer` objects."""

from __future__ import annotations

from shoal.functional.adam import Adam, AdamW
from shoal.functional.base import FunctionalOptimizer, State, StateEntry
from shoal.functional.bound import BoundOptimizer
from shoal.functional.kernels import Kernel
from shoal.functional.registry import (
    bind,
    functional_optim_map,
    register_functional_optim,
    register_functional_optimizer,
)

__all__ = [
    "Adam",
    "AdamW",
    "BoundOptimizer",
    "FunctionalOptimizer",
    "Kernel",
    "State",
    "StateEntry",
    "bind",
    "functional_optim_map",
    "register_functional_optim",
    "register_functional_optimizer",
]
