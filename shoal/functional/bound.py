"""A functional optimizer bound to the parameters that it updates: one way to use every form that can be registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from shoal.functional._torch import TensorGuards, base_of, guards_of
from shoal.functional.base import FunctionalOptimizer, State
from shoal.functional.kernels import Kernel


class BoundOptimizer(ABC):
    """What the remote room steps. Not thread-safe: its owner lets one call at a time in.

    State dicts are the same for all forms: ``{"state": {index: {name: tensor}}, "options": {name: value}}``, where the
    index is a parameter's place in the list; so each is one parameter group of a torch.optim state dict. As there the
    tensors are the optimizer's own, and loading copies.
    """

    params: list[Tensor]

    @abstractmethod
    def step(self, gradients: list[Tensor | None]) -> None:
        """Update the parameters in place; a parameter whose gradient is None is left alone, with its state.

        Raises:
            ValueError: unless there is one gradient, or None, per parameter.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State and options; see the class."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state, and the options that are named; a parameter without an entry begins anew.

        Raises:
            ValueError: for names or shapes that do not fit. Then nothing has been changed.
        """

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options by name. Assigning a dict changes those that are in it, from the next step on.

        Raises:
            ValueError: on assigning an unknown name or a value out of range. Then nothing has been changed.
        """

    @options.setter
    @abstractmethod
    def options(self, options: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Fit:
    """The knowledge that parameters and their fresh state can go to the fused kernel as they are, with every gradient
    that lies in memory like its parameter.

    `FunctionalOptimizer.step` finds this out anew in every step. For 100 small tensors that takes longer than the
    update, and it holds the GIL. Here one call of torch compares all of them.

    Attributes:
        guards: the class, dtype, device, shape and strides of every parameter, and then of every gradient.
        tensors: how many tensors these are together.
        counts: the number of steps of every parameter; None where the optimizer does not count.
    """

    guards: TensorGuards
    tensors: int
    counts: Tensor | None

    @classmethod
    @torch.no_grad()  # as a step is: the guards know that, too
    def of(cls, optimizer: FunctionalOptimizer, params: list[Tensor], state: State) -> _Fit | None:
        """None where it is not so."""
        same_place = len({(param.dtype, param.device) for param in params}) == 1
        if not same_place or not all(param.is_contiguous() for param in params):
            return None
        if optimizer.kernel(params) is not Kernel.FUSED:
            return None
        examples = [*params, *(param.detach() for param in params)]
        if (guards := guards_of(examples)) is None:
            return None
        # As init() makes them the counters are views of one tensor.
        return cls(guards, len(examples), base_of(state["step"][0]) if "step" in state else None)

    def holds(self, params: list[Tensor], gradients: Sequence[Tensor | None]) -> bool:
        """Whether the parameters still are what they were, and every one has a gradient that fits too."""
        if isinstance(gradients, Tensor):  # its rows would fit
            return False
        tensors = (*params, *gradients)
        return len(tensors) == self.tensors and self.guards.check(*tensors)


class BoundFunctional(BoundOptimizer):
    """A :class:`FunctionalOptimizer` with the parameters and the state that it updates.

    Attributes:
        optimizer: the value that holds the options.
        state: name to one tensor per parameter.
    """

    def __init__(self, optimizer: FunctionalOptimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.params = list(params)
        self.state: State = optimizer.init(self.params)
        self._fit = _Fit.of(optimizer, self.params, self.state)

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor | None], *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """As :meth:`FunctionalOptimizer.step`."""
        if (
            grad_scale is None
            and found_inf is None
            and self._fit is not None
            and self._fit.holds(self.params, gradients)
        ):
            if self._fit.counts is not None:
                self._fit.counts.add_(1)
            self.optimizer._run_fused(self.params, gradients, self.state, None, None)  # type: ignore[arg-type]
        else:
            self.optimizer.step(self.params, gradients, self.state, grad_scale=grad_scale, found_inf=found_inf)

    def state_dict(self) -> dict[str, Any]:
        entries = ({name: tensors[index] for name, tensors in self.state.items()} for index in range(len(self.params)))
        state = {index: kept for index, entry in enumerate(entries) if (kept := self.optimizer.reduce(entry))}
        return {"state": state, "options": self.options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        optimizer = self._with(state_dict["options"])
        self.state = self._loaded(optimizer, state_dict["state"])
        self.optimizer = optimizer
        self._fit = _Fit.of(optimizer, self.params, self.state)

    @property
    def options(self) -> dict[str, Any]:
        return {field.name: getattr(self.optimizer, field.name) for field in fields(self.optimizer) if field.init}  # type: ignore[arg-type]

    @options.setter
    def options(self, options: Mapping[str, Any]) -> None:
        optimizer = self._with(options)
        if optimizer.state_layout.keys() != self.optimizer.state_layout.keys():
            raise ValueError(
                f"with these options the state would be {list(optimizer.state_layout)} in place of "
                f"{list(self.optimizer.state_layout)}: bind a new optimizer"
            )
        kernels = ("foreach", "fused", "capturable")
        if any(getattr(optimizer, name) != getattr(self.optimizer, name) for name in kernels):
            # Another kernel may want its counters elsewhere.
            self.state = self._loaded(optimizer, self.state_dict()["state"])
            self._fit = _Fit.of(optimizer, self.params, self.state)
        self.optimizer = optimizer

    def _with(self, options: Mapping[str, Any]) -> FunctionalOptimizer:
        known = self.options
        for name in options:
            if name not in known:
                raise ValueError(f"{type(self.optimizer).__name__} has no option {name!r}; it has {', '.join(known)}")
        return replace(self.optimizer, **options)  # type: ignore[type-var]

    @torch.no_grad()
    def _loaded(self, optimizer: FunctionalOptimizer, entries: Mapping[int, Mapping[str, Tensor | None]]) -> State:
        for index in entries:
            if index not in range(len(self.params)):
                raise ValueError(f"the state dict has state for parameter {index} of {len(self.params)}")
        state = optimizer.init(self.params)
        for index, given in entries.items():
            entry = optimizer.complete(given)
            if not entry:  # as torch.optim saves a parameter that has made no step
                continue
            if entry.keys() != state.keys():
                raise ValueError(
                    f"the state of parameter {index} is {sorted(entry)}, but {type(optimizer).__name__} with these "
                    f"options has {sorted(state)}"
                )
            for name, value in entry.items():
                target = state[name][index]
                if value.shape != target.shape:
                    raise ValueError(
                        f"state {name!r} of parameter {index} has shape {list(value.shape)}, expected "
                        f"{list(target.shape)}"
                    )
                target.copy_(value)
        return state
