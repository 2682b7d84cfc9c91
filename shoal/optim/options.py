"""What `Optimizer` is given: which arguments make sense, and the torch objects that are made from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.optim.offload import HostCopy

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


def host_copy(optimizer: torch.optim.Optimizer | OptimizerFactory, params: Params | None) -> HostCopy:
    """What an offloaded optimizer is made of. Raises ValueError if it can't be made here."""
    if isinstance(optimizer, torch.optim.Optimizer) or params is None:
        raise ValueError(
            "offload_optimizer=True makes the optimizer over parameters of its own: give optimizer= as a function, and "
            "params="
        )
    return HostCopy(params)


def make_optimizer(optimizer: torch.optim.Optimizer | OptimizerFactory, params: Params | None) -> torch.optim.Optimizer:
    """The local optimizer. Raises ValueError if `optimizer` and `params` do not go together, or if its step needs a
    closure."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("optimizer= is a ready optimizer, which has its parameters: leave params= out")
        return _steps_by_itself(optimizer)
    if not callable(optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch optimizer, or a function that makes one from params")
    if params is None:
        raise ValueError("optimizer= is a function, which needs params=: the model's parameters or parameter groups")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= made {type(made).__name__}, which is not a torch.optim.Optimizer")
    return _steps_by_itself(made)


def _steps_by_itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer= is a {type(optimizer).__name__}, whose step evaluates the loss again and again (its closure), "
            "and peers average gradients once per step: choose an optimizer whose step needs no closure"
        )
    return optimizer


def make_scheduler(
    scheduler: LRScheduler | SchedulerFactory | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """The scheduler of the local optimizer. Raises ValueError for what is none."""
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        if not callable(scheduler):
            raise ValueError(f"scheduler={scheduler!r}: give a torch scheduler, or a function that makes one")
        scheduler = scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"scheduler= is a {type(scheduler).__name__}: give a torch scheduler that steps by itself, without a metric"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError("scheduler= is of another optimizer than the one given: make it from that one")
    return scheduler
