"""The interface of all functional optimizers, and their common code: the choice of kernel, and checks of its
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.flat.modes import neutral
from shoal.functional._torch import foreach_div_
from shoal.functional.kernels import SMALL, Kernel, advance, take_back
from shoal.functional.memory_order import alike, by_place, unalike_rows

State = dict[str, list[Tensor]]
"""The state of an optimizer: for every name one tensor per parameter, in the parameters' order."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The form of one entry of an optimizer's state.

    Attributes:
        like_parameter: True for a tensor with the parameter's shape, strides, dtype and device. False for one number
            per tensor: a 0-dim float32 tensor (float64 if that is torch's default dtype and no fused kernel runs).
        initial: the initial value of all elements.
        on_device: whether a number always lies on the parameter's device. If False, it lies there only with a fused
            kernel or ``capturable``, and otherwise on the CPU, as in torch.optim.
    """

    like_parameter: bool
    initial: float = 0.0
    on_device: bool = False


LIKE_PARAMETER = StateEntry(like_parameter=True)
"""A tensor like the parameter, with zeros at first."""

NUMBER = StateEntry(like_parameter=False)
"""One number per tensor, zero at first."""


class FunctionalOptimizer(ABC):
    """An optimizer that is a value: its options, and a pure in-place update of tensors that others own.

    Subclasses are frozen dataclasses. Their fields are the options of the torch class of the same name, with its
    defaults and in its order. To change an option over time, make a new value: ``optimizer =
    dataclasses.replace(optimizer, lr=0.1)``. A state fits all values with the same `state_layout`.

    The numbers are those of torch.optim, because the same kernels run. ``foreach`` and ``fused`` choose a kernel as in
    torch. If both are None, Shoal takes the fastest: the fused kernel if torch has one for the device and dtype, else
    foreach or the for-loop, as measured. With the same kernel on the same shapes the result is equal to the bit. In
    flat memory the ends of tensors fall on other elements, and the fused CPU kernels round the ends differently:
    `shoal.functional` gives the tolerance.

    Every class refuses ``differentiable=True``: the update is in place and records nothing for autograd.

    Attributes:
        element_wise: whether every element is updated only from its own gradient and state and from the numbers of its
            tensor. If so, any span of flat memory may be updated alone, and several tensors may be updated as one.
    """

    element_wise: ClassVar[bool]
    sparse_gradients: ClassVar[bool] = False
    """Whether gradients may be ``torch.sparse_coo``, as in torch's own class."""
    foreach_on_cpu: ClassVar[bool] = True
    """Whether foreach is ever faster than the for-loop on a CPU."""
    trial_options: ClassVar[dict[str, Any]] = {}
    """Options with which a fused kernel is tried."""

    lr: float | Tensor
    foreach: bool | None
    maximize: bool
    # Not every class has these options. A subclass without them keeps these values.
    differentiable: bool = False
    fused: bool | None = False
    capturable: bool = False

    @abstractmethod
    def _layout(self) -> dict[str, StateEntry]:
        """The value of :attr:`state_layout` for these options."""

    @abstractmethod
    def _update(self, params: list[Tensor], grads: list[Tensor], state: State, *, foreach: bool) -> None:
        """Makes one step of one or more tensors of one dtype and device, with the foreach kernel or the for-loop."""

    def _update_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """As `_update`, with the fused kernel, on dense tensors. ``scale`` and ``found_inf`` are on the tensors'
        device.
        """
        counted = "step" in self.state_layout
        if counted:
            advance(state["step"])
        self._run_fused(params, grads, state, scale, found_inf)
        if counted:
            take_back(state["step"], found_inf)

    def _run_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """The rest of `_update_fused`, after the numbers of steps have been advanced."""
        raise NotImplementedError(f"torch has no fused kernel of {type(self).__name__}")

    def complete(self, entry: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The state of one parameter, from its entry in a torch.optim state dict. Adds what only this class keeps.

        Args:
            entry: the parameter's state in torch.optim, by name. None values are dropped.
        """
        return {name: value for name, value in entry.items() if value is not None}

    def reduce(self, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`complete`: the entry that torch.optim would keep. It may be empty before the first
        step.
        """
        return dict(entry)

    @cached_property
    def state_layout(self) -> dict[str, StateEntry]:
        """The entries of the state with these options, by name. The names are those of torch.optim's state."""
        return self._layout()

    def kernel(self, params: Sequence[Tensor]) -> Kernel:
        """The kernel that the options ask for, or the fastest one if they leave it open.

        Args:
            params: at least one tensor, all of one dtype and device.

        Raises:
            RuntimeError: with ``fused=True``, if torch has no correct fused kernel for the dtype on the device.
        """
        if self.foreach:
            return Kernel.FOREACH
        device, dtype = params[0].device, params[0].dtype
        if self.fused or (self.fused is None and self.foreach is None):
            if _has_fused_kernel(type(self), device, dtype):
                return Kernel.FUSED
            if self.fused:
                raise RuntimeError(
                    f"torch {torch.__version__} has no fused kernel of {type(self).__name__} for {dtype} on "
                    f"{device.type}, or one that gives wrong numbers: leave out fused=True"
                )
        # As in torch, foreach takes a learning rate or betas that are tensors only if they stay on the device.
        tensors = any(isinstance(value, Tensor) for value in (self.lr, *getattr(self, "betas", ())))
        if self.foreach is False or (tensors and not self.capturable):
            return Kernel.LOOP
        if device.type == "cpu":
            small = sum(param.numel() for param in params) < SMALL * len(params)
            return Kernel.FOREACH if small and self.foreach_on_cpu else Kernel.LOOP
        return Kernel.FOREACH

    @neutral
    @torch.no_grad()
    def init(self, params: Sequence[Tensor]) -> State:
        """The initial state: for each name of `state_layout`, one tensor per parameter, in the parameters' order.

        Args:
            params: the parameters, a list of strided tensors.

        Raises:
            TypeError: if ``params`` is a tensor instead of a list.
        """
        check_list(params)
        state: State = {name: [torch.empty(0)] * len(params) for name in self.state_layout}
        for rows in by_place(params):
            for name, entry in self.state_layout.items():
                fresh = self._fresh(entry, [params[row] for row in rows])
                for row, tensor in zip(rows, fresh, strict=True):
                    state[name][row] = tensor
        return state

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: State,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Updates the parameters and the state in place.

        Args:
            params: a list of one flat tensor, or of many tensors of any shapes, dtypes and devices, all strided. They
                may require grad or not.
            grads: one gradient for each parameter, with its shape, dtype and device. If it is None, the parameter and
                its state are left alone. SGD and Adagrad also take sparse gradients, as in torch.optim.
            state: from :meth:`init` of an optimizer with the same `state_layout`, for the same parameters.
            grad_scale: a float32 tensor of one element; None for no scaling. The gradients are divided by it *in
                place*, as torch's fused kernels do.
            found_inf: a float32 tensor of one element; None to always update. If it is 1, nothing is updated. Without a
                fused kernel, reading it waits for the device.

        Raises:
            TypeError: if ``params`` or ``grads`` is a tensor instead of a list.
            ValueError: if lists differ in length, if a gradient differs from its parameter in shape, dtype or device,
                or if the state lacks a name that these options need.
            RuntimeError: if gradients are sparse and the class does not support that. Errors of the kernel pass
                through.
        """
        self._check_lists(params, grads, state)
        places = {(param.dtype, param.device) for param in params}
        ready = [grad for grad in grads if grad is not None]
        if len(places) == 1 and len(ready) == len(params):  # the usual case
            self._step_place(list(params), ready, state, grad_scale, found_inf)
            return
        for place in places:
            rows = [
                row
                for row, param in enumerate(params)
                if grads[row] is not None and (param.dtype, param.device) == place
            ]
            if rows:
                some = [grad for row in rows if (grad := grads[row]) is not None]
                part = {name: [tensors[row] for row in rows] for name, tensors in state.items()}
                self._step_place([params[row] for row in rows], some, part, grad_scale, found_inf)

    def _step_place(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        _check_shapes("the gradient", [param.shape for param in params], grads)
        _check_place((params[0].dtype, params[0].device), grads)
        kernel = self.kernel(params)
        if {grad.layout for grad in grads} != {torch.strided}:
            if not self.sparse_gradients:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: pass grad.to_dense()")
            kernel = Kernel.LOOP
        if kernel is Kernel.FUSED:
            device = params[0].device
            scale = None if scale is None else scale.to(device, non_blocking=True)
            found_inf = None if found_inf is None else found_inf.to(device, non_blocking=True)
            self._step_fused(params, grads, state, scale, found_inf)
            return
        if found_inf is not None and found_inf.item():
            return
        if scale is not None:
            foreach_div_(grads, scale.to(params[0].device, non_blocking=True).reshape(()))
        self._update(params, grads, state, foreach=kernel is Kernel.FOREACH)

    def _step_fused(
        self, params: list[Tensor], grads: list[Tensor], state: State, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Runs the fused kernel, on copies of tensors that differ in memory order: it reads memory in order and ignores
        strides.
        """
        names = [name for name, entry in self.state_layout.items() if entry.like_parameter]
        shapes = [param.shape for param in params]
        for name in names:
            _check_shapes(name, shapes, state[name])
        columns = [params, grads, *(state[name] for name in names)]
        if alike(columns):
            self._update_fused(params, grads, state, scale, found_inf)
            return
        rows = unalike_rows(columns)
        copies = [list(column) for column in columns]
        for column in copies:
            for row in rows:
                column[row] = column[row].contiguous()
        part = {**state, **dict(zip(names, copies[2:], strict=True))}
        self._update_fused(copies[0], copies[1], part, scale, found_inf)
        for column, copied in zip(columns, copies, strict=True):
            for row in rows:
                # An expanded gradient holds one number for many elements: it can't be written, and need not be.
                if column is not grads and copied[row] is not column[row]:
                    column[row].copy_(copied[row])

    def _fresh(self, entry: StateEntry, params: list[Tensor]) -> list[Tensor]:
        if entry.like_parameter:
            if entry.initial == 0:
                return [torch.zeros_like(param) for param in params]
            value: Any = entry.initial
            if params[0].is_complex():  # a complex number counts as two real ones, each with its own state
                value = complex(value, value)
            return [torch.full_like(param, value) for param in params]
        fused = self.kernel(params) is Kernel.FUSED
        beside = fused or self.capturable or entry.on_device
        wide = torch.get_default_dtype() == torch.float64 and not fused
        # Views of one tensor, so that the counters of all parameters can be advanced by one operation.
        together = torch.full(
            (len(params),),
            entry.initial,
            dtype=torch.float64 if wide else torch.float32,
            device=params[0].device if beside else "cpu",
        )
        return list(together.unbind())

    def _check_lists(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: State) -> None:
        check_list(params)
        check_list(grads)
        if len(params) != len(grads):
            raise ValueError(f"one gradient, or None, per parameter: got {len(params)} and {len(grads)}")
        for name in self.state_layout:
            if name not in state:
                raise ValueError(
                    f"the state has no {name!r}, which {type(self).__name__} needs with these options: "
                    "make it with init() of an optimizer with the same options"
                )
        for name, tensors in state.items():
            if len(tensors) != len(params):
                raise ValueError(f"one tensor of state {name!r} per parameter: got {len(tensors)} for {len(params)}")

    def _check(self, **at_least_zero: float | Tensor) -> None:
        """Checks the options that every class has, and these options of one class, which may not be negative."""
        if self.differentiable:
            raise ValueError(
                "differentiable=True is refused: a functional optimizer updates in place and records nothing for "
                "autograd. Use torch.optim to differentiate through a step"
            )
        if isinstance(self.lr, Tensor) and self.lr.numel() != 1:
            raise ValueError(f"lr as a tensor has one element, got {self.lr.numel()}")
        for name, value in {"lr": self.lr, **at_least_zero}.items():
            if not value >= 0:
                raise ValueError(f"{name} is at least 0, got {value}")
        if self.fused and self.foreach:
            raise ValueError("fused=True and foreach=True: choose one kernel")


@cache
def _has_fused_kernel(optimizer_class: type[FunctionalOptimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this version of torch has a correct fused kernel, found by one trial on a few elements.

    (In torch 2.13 the CPU's fused SGD with momentum leaves 16-bit parameters unchanged.)
    """
    if not dtype.is_floating_point:
        return False
    results = []
    for options in ({"fused": True}, {"foreach": False}):
        optimizer = optimizer_class(**optimizer_class.trial_options, **options)
        param = torch.zeros(67, dtype=dtype, device=device)  # several vector registers, and a remainder
        state = {
            name: [torch.zeros_like(param) if entry.like_parameter else torch.zeros((), device=device)]
            for name, entry in optimizer.state_layout.items()
        }
        grads = [torch.ones_like(param)]
        try:
            with torch.no_grad():
                if optimizer.fused:
                    optimizer._update_fused([param], grads, state, None, None)
                else:
                    optimizer._update([param], grads, state, foreach=False)
        except torch.OutOfMemoryError:  # tells nothing about kernels
            raise
        except (NotImplementedError, RuntimeError):
            return False
        results.append(param)
    fused, loop = results
    return torch.allclose(fused, loop, rtol=0.05, atol=0)


def _check_shapes(what: str, shapes: list[torch.Size], tensors: list[Tensor]) -> None:
    """Checks shapes before a fused kernel runs. Such a kernel would read and write beyond the end of a tensor that is
    too small.
    """
    if [tensor.shape for tensor in tensors] == shapes:
        return
    for shape, tensor in zip(shapes, tensors, strict=True):
        if tensor.shape != shape:
            raise ValueError(f"{what} of a parameter of shape {list(shape)} has shape {list(tensor.shape)}")


def _check_place(place: tuple[torch.dtype, torch.device], grads: list[Tensor]) -> None:
    """Checks dtype and device here, because a kernel refuses wrong ones only after the number of steps has been
    advanced.
    """
    dtype, device = place
    for wrong in {(grad.dtype, grad.device) for grad in grads} - {place}:
        raise ValueError(
            f"a gradient is of {wrong[0]} on {wrong[1]}, but its parameter of {dtype} on {device}: pass grad.to(param)"
        )


def check_list(tensors: Sequence[Tensor | None]) -> None:
    """Raises TypeError for a tensor, which would otherwise be taken as the list of its rows."""
    if isinstance(tensors, Tensor):
        raise TypeError(
            f"parameters and gradients are lists of tensors: pass [tensor], got shape {list(tensors.shape)}"
        )


def check_fraction(name: str, value: float | Tensor) -> None:
    """Raises ValueError for a decay rate that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is at least 0 and below 1, got {value}")


def check_betas(betas: Sequence[float | Tensor]) -> None:
    """Raises ValueError for anything but two decay rates in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas are two numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_fraction(f"betas[{index}]", beta)
