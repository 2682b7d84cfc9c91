"""What of one peer's training is averaged by a `TrainingStateAverager`, and the copies of it that rounds work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.compression import CompressionInfo, TensorRole
from shoal.flat import Places
from shoal.optim import options
from shoal.optim.shared import kept_positive
from shoal.optim.state import TrainingState


class UnmovedState(TrainingState):
    """A training state whose tensors stay where they are: an averager has the memory."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, extra_tensors: Sequence[torch.Tensor]
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def adopt_statistics(self) -> None:
        """Nothing moves."""


class LocalState:
    """Optimizer, parameters and extra tensors of one peer, and the tensors that are averaged: these themselves, or
    copies.

    Args:
        optimizer, params, scheduler: as of `shoal.Optimizer`.
        offload: give the optimizer parameters of its own on the host.
        initialize: make the optimizer's statistics now; None: if it has none.
        reuse: average the optimizer's tensors themselves.
        statistics: names of the optimizer's statistics that are averaged.
        extra_tensors: averaged, too.
        names: of the parameters; by default their positions.

    Attributes:
        main_parameters: the model's.
        optimizer, scheduler: which step.
        averaged: what is averaged: parameters, statistics (one name after the other), extra tensors.
        infos: of those, in their order.
        shared: what newcomers get.

    Raises ValueError for arguments that do not go together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | options.OptimizerFactory,
        params: options.Params | None,
        scheduler: LRScheduler | options.SchedulerFactory | None,
        *,
        offload: bool,
        initialize: bool | None,
        reuse: bool,
        statistics: Sequence[str],
        extra_tensors: Sequence[torch.Tensor],
        names: Sequence[str | int] | None,
    ) -> None:
        self.offload, self.reuse = offload, reuse
        self._own: list[torch.Tensor] = []  # the optimizer's parameters
        if offload:
            host = options.host_copy(optimizer, params)
            self.optimizer = options.make_optimizer(optimizer, host.groups)
            self.main_parameters = tuple(host.model)
        else:
            self.optimizer = options.make_optimizer(optimizer, params)
            self.main_parameters = tuple(p for group in self.optimizer.param_groups for p in group["params"])
        self.scheduler = options.make_scheduler(scheduler, self.optimizer)
        self._own = [p for group in self.optimizer.param_groups for p in group["params"]]
        if initialize or (initialize is None and not any(self.optimizer.state.values())):
            initialize_state(self.optimizer)
        self._places = Places(self.main_parameters)
        self._places.keep()
        self.shared = UnmovedState(self.optimizer, self.scheduler, extra_tensors)
        self._statistics = tuple(statistics)
        local = self.local
        self.averaged = local if reuse else [_host_copy(tensor) for tensor in local]
        self.infos = self._infos(range(len(self._own)) if names is None else names)

    @property
    def local(self) -> list[torch.Tensor]:
        """The tensors that the optimizer works on, and the extra ones. Raises ValueError if a statistic is missing."""
        found = list(self._own)
        for name in self._statistics:
            for tensor in self.shared.statistics(name):
                if tensor is None:
                    raise ValueError(f"average_opt_statistics has {name!r}, but the optimizer has no statistics yet: "
                                     "leave initialize_optimizer out, or make a step first")  # fmt: skip
                found.append(tensor)
        return found + self.shared.extra_tensors

    def _infos(self, names: Sequence[str | int]) -> list[CompressionInfo]:
        if len(names) != len(self._own):
            raise ValueError(f"parameter_names has {len(names)} names, and there are {len(self._own)} parameters")
        given: list[tuple[str | int, TensorRole, str]] = [(name, TensorRole.PARAMETER, "") for name in names]
        for statistic in self._statistics:
            given += [(f"{name}.{statistic}", TensorRole.OPTIMIZER, statistic) for name in names]
        given += [(number, TensorRole.UNSPECIFIED, "") for number in range(len(self.shared.extra_tensors))]
        return [CompressionInfo.from_tensor(tensor, *of) for tensor, of in zip(self.averaged, given, strict=True)]

    def check(self) -> None:
        """Raises ValueError if a module computes with another parameter than the one that is trained."""
        if (place := self._places.replaced()) is not None:
            index, name = place
            raise ValueError(
                f"parameter {index} was replaced: a module has another tensor as its {name!r} now, which is not "
                "trained; change the model before you make the averager, or write into the tensor that is there (copy_)"
            )

    # -- between the model and an optimizer on the host

    @torch.no_grad()
    def load_gradients(self) -> None:
        """Give the optimizer the model's gradients."""
        for mine, main in zip(self._own, self.main_parameters, strict=True):
            mine.grad = None if main.grad is None else main.grad.to(mine, copy=True)

    @torch.no_grad()
    def publish(self) -> None:
        """Set the model's parameters to the optimizer's."""
        if self.offload:
            torch._foreach_copy_(list(self.main_parameters), self._own)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the optimizer and of the model."""
        self.optimizer.zero_grad(set_to_none)
        for parameter in self.main_parameters if self.offload else ():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # -- between the optimizer and a round

    @torch.no_grad()
    def take(self) -> None:
        """Bring what is now to where it is averaged."""
        if not self.reuse:
            torch._foreach_copy_(self.averaged, self.local)

    @torch.no_grad()
    def put(self, before: Sequence[torch.Tensor] | None) -> None:
        """Set the tensors to their averages; with `before`, what `averaged` was, add what has changed since: no
        statistic becomes negative by that."""
        if self.reuse:
            return
        given = zip(self.local, self.averaged, before or self.averaged, self.infos, strict=True)
        for tensor, average, old, info in given:
            if before is None:
                tensor.copy_(average)
                continue
            moved = tensor + (average - old).to(tensor)
            if info.role is TensorRole.OPTIMIZER:
                moved = kept_positive(moved, average.to(tensor), tensor)
            tensor.copy_(moved)

    def update_scheduler(self, epoch: int) -> None:
        """Step the scheduler until it is at that epoch."""
        while self.scheduler is not None and self.scheduler.last_epoch < epoch:
            self.scheduler.step()


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its statistics, by a step with gradients of zero; parameters and step counts are put back
    to what they were."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(parameter.grad, parameter.detach().clone()) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step: Callable[[], Any] = optimizer.step
    step()
    with torch.no_grad():
        for parameter, (gradient, value) in zip(parameters, before, strict=True):
            parameter.grad = gradient
            parameter.copy_(value)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()
            elif "step" in state:
                state["step"] = 0


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.dtype is torch.float64 else torch.float32
    return tensor.detach().to("cpu", dtype, copy=True)
