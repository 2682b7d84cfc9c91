"""The private names of torch that this room uses. No other file of the room uses one.

The column "torch has it since" comes from the sources of torch 2.0.1, 2.4.0 and 2.6.0. Shoal supports 2.6 and later.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``distributed_c10d._get_process_group_store`` | ranks leave notes of their failures there | 2.4, not in 2.0 | importing the room raises ImportError |
| ``join._JoinConfig``, ``Joinable._join_config`` | what `Join` sets and torch's joinables read | 2.0 or before | importing the room raises ImportError |
| ``Reducer._set_forward_pass_work_handle``, ``DistributedDataParallel._divide_by_initial_world_size`` | the divisor of DDP's gradients in a `Join` | 2.0 or before | AttributeError or KeyError at the first heartbeat of a `Join` with DDP |
| ``torch._C._current_graph_task_id`` | whether the backward pass calls a hook of DDP | 2.0 or before | AttributeError in the first backward pass of `hook_with_zero_step` |
| ``Optimizer._opt_called`` | schedulers warn if the optimizer has made no step before them | 2.4, not in 2.0 | it is only set: schedulers may warn |
| ``Variable._execution_engine.queue_callback`` | a call at the end of the backward pass, as DDP has | 2.0 or before | importing the room raises AttributeError |
| ``Tensor._version`` | whether somebody has written to a tensor | 2.0 or before | AttributeError at the first step |
| ``Tensor._make_wrapper_subclass`` | a tensor of the whole shape that holds parts only | 2.0 or before | AttributeError in `state_dict` where a parameter is cut |
| ``GradScaler._unscale_grads_`` | to unscale gradients that are not in ``param.grad`` | 2.0 or before | torch's own scaler runs, and finds no gradients |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

JoinConfig = _JoinConfig

store_of = _get_process_group_store
"""The store of a process group."""

join_config_of: Callable[[Joinable], JoinConfig] = attrgetter("_join_config")
"""The settings that `Join` gave to a joinable."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How many times a tensor was written to."""

call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""To be called within a backward pass: registers a function to call when the whole pass is done."""

make_wrapper = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape, but no memory of its own."""


def set_join_config(joinable: Joinable, config: JoinConfig) -> None:
    """Tells a joinable the settings of its `Join`."""
    joinable._join_config = config


def set_divisor(model: DistributedDataParallel, work: dist.Work, *, all_ranks: bool) -> None:
    """Makes a model divide gradients, in its next backward pass, by the number of all ranks or by the result of
    ``work``.
    """
    model.reducer._set_forward_pass_work_handle(work, all_ranks)


def divides_by_all_ranks(model: DistributedDataParallel) -> bool:
    """Whether a model's join hook was told to divide by the number of all ranks, and not by the number of live
    ranks.
    """
    by_all: bool = vars(model)["_divide_by_initial_world_size"]
    return by_all


def in_backward() -> bool:
    """Whether the caller runs within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Tells schedulers that the optimizer has made a step."""
    vars(optimizer)["_opt_called"] = True


class GradScaler(torch.amp.GradScaler):
    """torch's scaler, with its private method that unscales gradients under a public name that subclasses may
    override.
    """

    def unscale_grads(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiplies the gradients of an optimizer by ``inv_scale``. Returns, for each device, whether one was not
        finite.
        """
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
