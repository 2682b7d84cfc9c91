"""The private names of torch that this room uses. No other file of the room reaches for one.

Shoal supports torch 2.6 and later. "torch has it since" was read from the sources of torch 2.0.1, 2.4.0 and 2.6.0.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_*`` | one call for many tensors instead of one for each | 2.0, ``copy_`` 2.4 | importing the room raises AttributeError |
| ``_C._set_grad_enabled`` | the grad mode of a step, where `torch.no_grad` would take 4 % of it | 2.0 or before | importing the room raises AttributeError |
| ``Tensor._version`` | how often a tensor was written in place | 2.0 or before | AttributeError at the first step |
| ``batchnorm._NormBase`` | the class of all layers with running statistics | 2.0 or before | importing the room raises ImportError |
| ``Optimizer._opt_called`` | keeps schedulers from warning that no step came before them | 2.4 | it is only set: schedulers may warn |
| ``Optimizer._step_supports_amp_scaling`` | makes torch's scaler hand itself to ``step`` | 2.0 or before | it is only set: torch's scaler unscales the gradients itself |
| ``LRScheduler._step_count`` | how many steps a scheduler has made, for Accelerate | 2.0 or before | AttributeError where it is read |
| ``GradScaler._per_optimizer_states``, ``GradScaler._check_inf_per_device``, ``grad_scaler._refresh_per_optimizer_state`` | whether gradients overflowed, for each optimizer | 2.0 or before | importing the room raises ImportError, or AttributeError at the first step of a scaler |
| ``GradScaler._scale``, ``GradScaler._check_scale_growth_tracker``, ``GradScaler._unscale_grads_`` | one message for a loss that was not scaled; averaged gradients of float16 | 2.0 or before | the user gets torch's own assertion |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler

# Operations on lists of tensors: one call for all parameters, where a loop in Python would cost one call for each. The
# public `torch.optim` classes are built on them. torch has no public name for them.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

set_grad_mode = torch._C._set_grad_enabled
"""Sets whether operations of this thread are recorded. The public ways are objects, and take several times as long."""

NormBase = _NormBase
"""The base class of all layers that keep running statistics; torch has no public one."""


def writes_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place (`_version`). Autograd relies on this count; torch has no public name
    for it. In a torch without it, this raises an AttributeError."""
    return tensor._version


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep torch from warning that a scheduler was stepped before its optimizer (`_opt_called`). A torch that does not
    read the mark ignores it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def scale_by_own_rules(optimizer: torch.optim.Optimizer, yes: bool) -> None:
    """Have `torch.amp.GradScaler.step` hand itself to `optimizer.step(grad_scaler=…)` (`_step_supports_amp_scaling`,
    as torch's fused optimizers do). A torch that does not read it unscales the gradients itself."""
    optimizer._step_supports_amp_scaling = yes  # type: ignore[attr-defined]


class OpenGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that gives subclasses public names for its inner workings.

    torch keeps a record for each optimizer (`_per_optimizer_states`): its stage since the last `update`, and whether
    its gradients overflowed (`_check_inf_per_device` looks). In a torch without one of these, the methods here that use
    it raise an AttributeError.
    """

    def overflows_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """For each device of the optimizer's gradients, a tensor that is not 0 if they overflowed. The list is empty
        until `look_for_overflow` or `unscale_` has looked."""
        return list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())

    def all_overflows(self) -> list[torch.Tensor]:
        """The tensors of `overflows_of` for all optimizers."""
        return [value for one in self._per_optimizer_states.values() for value in one["found_inf_per_device"].values()]

    def look_for_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Record whether the optimizer's gradients overflowed, and leave them as they are."""
        self._check_inf_per_device(optimizer)

    def may_unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients may be unscaled: nobody has done so since the last `update`."""
        return bool(self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY)

    def forget_overflows(self) -> None:
        """Reset the records, as `update` does, and leave the scale as it is."""
        for key in self._per_optimizer_states:
            self._per_optimizer_states[key] = _refresh_per_optimizer_state()

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        # The first call of `scale` makes the scale. torch 2.6 to 2.13 calls this method before each use of the scale.
        # In a torch that does not, the user gets torch's own assertion instead of this message.
        if self._scale is None:
            raise RuntimeError(
                "the loss of these gradients was not scaled: call GradScaler.scale(loss) before backward"
            )
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # A `shoal.Optimizer` averages the gradients before it uses them, so none of torch's reasons to refuse holds.
        allow_fp16 = allow_fp16 or hasattr(optimizer, "reuse_grad_buffers")
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class StepCounted:
    """Passes on the `_step_count` of a scheduler, which Accelerate reads and writes. If a scheduler has none, reading
    it raises an AttributeError."""

    scheduler: LRScheduler

    @property
    def _step_count(self) -> int:
        return self.scheduler._step_count

    @_step_count.setter
    def _step_count(self, count: int) -> None:
        self.scheduler._step_count = count
