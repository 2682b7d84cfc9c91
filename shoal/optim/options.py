"""Which arguments of `Optimizer` make sense together, and which ones every peer of a run must agree on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from shoal import __version__

# Arguments of the reference that are not built yet, each with the value that changes nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "reuse_grad_buffers": (False,),
    "offload_optimizer": (None, False),
    "delay_optimizer_step": (None, False),
    "delay_grad_averaging": (False,),
    "use_local_updates": (False,),
    "auxiliary": (False,),
    "grad_averager_factory": (None,),
    "average_opt_statistics": ((), None, []),
    "averager_opts": (None, {}),
    "tracker_opts": (None, {}),
}


def refuse_not_built(arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError that names the arguments that do not work yet."""
    asked = [f"{name}={arguments[name]!r}" for name, unset in NOT_BUILT.items() if arguments[name] not in unset]
    if asked:
        raise NotImplementedError(f"shoal {__version__} does not have {', '.join(asked)} yet: leave it at its default")


def check_times(arguments: Mapping[str, float | None]) -> None:
    """Raise ValueError if a time is not a positive number of seconds (or None, where that is allowed)."""
    for name, value in arguments.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: give a positive number of seconds")


def machine() -> str:
    """Names all on which the bits of a local step depend: peers whose names are equal make bit-identical steps."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = [f"torch {torch.__version__}", platform.machine(), capability, f"{torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)[:256]
