"""What `Optimizer` is given: which arguments make sense, and the torch objects that are made from them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.compression import Compression, NoCompression

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

# Arguments of the reference that are not built yet, each with the values that change nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "reuse_grad_buffers": (False,),
    "offload_optimizer": (None, False),
    "delay_optimizer_step": (None, False),
    "delay_grad_averaging": (False,),
    "average_state_every": (1,),
    "use_local_updates": (False,),
    "auxiliary": (False,),
    "grad_averager_factory": (None,),
    "state_averaging_compression": (None, NoCompression()),
    # A lossy one makes a newcomer's state another than the donors' until states are averaged.
    "load_state_compression": (None, NoCompression()),
    "average_opt_statistics": ((), None, []),
    "averager_opts": (None, {}),
    "tracker_opts": (None, {}),
}


def check_run_id(run_id: object) -> None:
    """Raise ValueError if it can't name a run."""
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= 100:
        raise ValueError(f"run_id={run_id!r}: give a text of 1 to 100 characters")


def check_samples(arguments: Mapping[str, object], least: int) -> None:
    """Raise ValueError if a number of samples is not at least `least`."""
    for name, value in arguments.items():
        if not isinstance(value, int | float) or not least <= value < float("inf"):
            raise ValueError(f"{name}={value!r}: give a number of samples, at least {least}")


def check_times(arguments: Mapping[str, object]) -> None:
    """Raise ValueError if a time is not a positive number of seconds (at most a day)."""
    for name, value in arguments.items():
        if not isinstance(value, int | float) or not 0 < value <= 86400:
            raise ValueError(f"{name}={value!r}: give a positive number of seconds, at most a day (86400)")


def check_compressions(arguments: Mapping[str, object]) -> None:
    """Raise ValueError if something else than a compression is given for one."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Compression):
            raise ValueError(f"{name}={value!r}: give a compression, such as shoal.compression.Float16Compression()")


def check_alpha(alpha: object) -> None:
    """Raise ValueError if it is not a weight of a moving average."""
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ValueError(f"performance_ema_alpha={alpha!r}: give a number over 0 and at most 1")


def make_optimizer(optimizer: torch.optim.Optimizer | OptimizerFactory, params: Params | None) -> torch.optim.Optimizer:
    """The local optimizer. Raises ValueError if `optimizer` and `params` do not go together."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("optimizer= is a ready optimizer, which has its parameters: leave params= out")
        return optimizer
    if not callable(optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch optimizer, or a function that makes one from params")
    if params is None:
        raise ValueError("optimizer= is a function, which needs params=: the model's parameters or parameter groups")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= made {type(made).__name__}, which is not a torch.optim.Optimizer")
    return made


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


def machine() -> str:
    """Names all on which the bits of a local step depend: peers whose names are equal make bit-identical steps."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = [f"torch {torch.__version__}", platform.machine(), capability, f"{torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)[:256]
