"""A functional optimizer bound to the parameters that it updates: one interface for every form that can be
registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shoal.flat.modes import neutral
from shoal.functional._torch import TensorGuards, base_of, guards_of
from shoal.functional.base import FunctionalOptimizer, State
from shoal.functional.kernels import Kernel


class BoundOptimizer(ABC):
    """An optimizer together with its parameters and state; the remote room steps it. Not thread-safe: one call at a
    time.

    State dicts are the same for all forms: ``{"state": {index: {name: tensor}}, "options": {name: value}}``, where the
    index is a parameter's place in the list. So each is like one parameter group of a torch.optim state dict. As in
    torch.optim, the tensors are the optimizer's own, and loading copies them.

    A copy (`copy.deepcopy`, pickle) has copies of the parameters. Copied together with their model, it trains the copy
    of the model.
    """

    params: list[Tensor]

    @abstractmethod
    def step(self, gradients: list[Tensor | None]) -> None:
        """Updates the parameters in place. A parameter whose gradient is None is left alone, with its state.

        Args:
            gradients: one gradient, or None, per parameter.

        Raises:
            ValueError: if there is not one gradient, or None, per parameter.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state and the options, in the form that the class describes."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state, and those options that the dictionary names. A parameter without an entry starts afresh.

        Args:
            state_dict: in the form that the class describes. A number may be a tensor of one element, or an int or a
                float, as torch before 1.12 has saved it.

        Raises:
            ValueError: if names or shapes do not fit. Nothing has been changed then.
        """

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options by name. Assigning a dictionary changes the options that it names, from the next step on.

        Raises:
            ValueError: on assigning an unknown name or a value out of range. Nothing has been changed then.
        """

    @options.setter
    @abstractmethod
    def options(self, options: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Fit:
    """Says that parameters and their fresh state can go to the fused kernel as they are, if their gradients fit them.

    A gradient fits if it lies in memory like its parameter. `FunctionalOptimizer.step` checks all this anew in every
    step. For 100 small tensors these checks take longer than the update, and they hold the GIL. Here one call of torch
    compares all tensors.

    Attributes:
        guards: the class, dtype, device, shape and strides of every parameter, followed by those of every gradient.
        tensors: the number of these tensors.
        counts: the number of steps of every parameter; None if the optimizer does not count.
    """

    guards: TensorGuards
    tensors: int
    counts: Tensor | None

    @classmethod
    @torch.no_grad()  # as in a step: the guards compare this mode too
    def of(cls, optimizer: FunctionalOptimizer, params: list[Tensor], state: State) -> _Fit | None:
        """The fit of these parameters and this state; None if there is none."""
        same_place = len({(param.dtype, param.device) for param in params}) == 1
        if not same_place or not all(param.is_contiguous() for param in params):
            return None
        if optimizer.kernel(params) is not Kernel.FUSED:
            return None
        examples = [*params, *(param.detach() for param in params)]
        if (guards := guards_of(examples)) is None:
            return None
        # The counters are views of one tensor, because init() makes them so.
        return cls(guards, len(examples), base_of(state["step"][0]) if "step" in state else None)

    def holds(self, params: list[Tensor], gradients: Sequence[Tensor | None]) -> bool:
        """Whether the parameters are unchanged in these properties, and every one has a gradient that fits."""
        if isinstance(gradients, Tensor):  # the rows of a single tensor would fit
            return False
        tensors = (*params, *gradients)
        return len(tensors) == self.tensors and self.guards.check(*tensors)


class BoundFunctional(BoundOptimizer):
    """A :class:`FunctionalOptimizer` together with the parameters and the state that it updates.

    Attributes:
        optimizer: the functional optimizer, which holds the options.
        state: one tensor per parameter, by name.
    """

    @neutral
    def __init__(self, optimizer: FunctionalOptimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.params = list(params)
        self.state: State = optimizer.init(self.params)
        self._fit = _Fit.of(optimizer, self.params, self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "params": self.params, "state": self.state}

    @torch.no_grad()
    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Make the copy's state anew: copied counters would no longer be views of one tensor."""
        self.optimizer, self.params = kept["optimizer"], kept["params"]
        self.state = self.optimizer.init(self.params)
        for name, tensors in self.state.items():
            for mine, saved in zip(tensors, kept["state"][name], strict=True):
                mine.copy_(saved)
        self._fit = _Fit.of(self.optimizer, self.params, self.state)

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

    @neutral
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
            # Another kernel may need its counters on another device.
            self.state = self._loaded(optimizer, self.state_dict()["state"])
            self._fit = _Fit.of(optimizer, self.params, self.state)
        self.optimizer = optimizer

    def _with(self, options: Mapping[str, Any]) -> FunctionalOptimizer:
        known = self.options
        for name in options:
            if name not in known:
                raise ValueError(f"{type(self.optimizer).__name__} has no option {name!r}; it has {', '.join(known)}")
        return replace(self.optimizer, **options)  # type: ignore[type-var]

    @neutral
    @torch.no_grad()
    def _loaded(self, optimizer: FunctionalOptimizer, entries: Mapping[int, Mapping[str, Tensor | None]]) -> State:
        for index in entries:
            if index not in range(len(self.params)):
                raise ValueError(f"the state dict has state for parameter {index} of {len(self.params)}")
        state = optimizer.init(self.params)
        for index, given in entries.items():
            entry = optimizer.complete(given)
            if not entry:  # torch.optim saves an empty entry for a parameter without a step
                continue
            if entry.keys() != state.keys():
                raise ValueError(
                    f"the state of parameter {index} is {sorted(entry)}, but {type(optimizer).__name__} with these "
                    f"options has {sorted(state)}"
                )
            for name, value in entry.items():
                target = state[name][index]
                fitting = value if optimizer.state_layout[name].like_parameter else _number(value)
                if not isinstance(fitting, Tensor) or fitting.shape != target.shape:
                    found = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is {value!r:.80}"
                    raise ValueError(f"state {name!r} of parameter {index} {found}, expected {list(target.shape)}")
                target.copy_(fitting)
        return state


def _number(value: object) -> object:
    """State that is one number, as a 0-dim tensor. torch before 1.12 has saved such state as Python's int or float.
    Returns everything else unchanged.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    return torch.tensor(float(value), dtype=torch.float64, device="cpu") if isinstance(value, Real) else value
