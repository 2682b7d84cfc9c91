"""A torch.optim optimizer with the interface of functional ones, for classes that have no functional form."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.functional import BoundOptimizer


class BoundTorch(BoundOptimizer):
    """A torch.optim optimizer over one group of parameters. The parameters have their gradients only during a step.

    Args:
        optimizer_class: a `torch.optim.Optimizer`, or a class that has its constructor, ``step()``, ``param_groups``,
            ``state_dict()`` and ``load_state_dict()``.
        params: the tensors to update in place.
        group: the options of the parameter group that differ from the arguments.
        args: the positional arguments of the class after the parameters.
        kwargs: the same, by name.
    """

    def __init__(
        self,
        optimizer_class: type,
        params: Sequence[Tensor],
        group: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.params = list(params)
        given: Any = [{"params": self.params, **group}] if group else self.params
        self._optimizer: torch.optim.Optimizer = optimizer_class(given, *args, **kwargs)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that the constructor's arguments give."""
        return dict(self._optimizer.defaults)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """As :meth:`BoundOptimizer.step`. Afterwards ``.grad`` of the parameters is what it was before."""
        before = [param.grad for param in self.params]
        try:
            for param, gradient in zip(self.params, gradients, strict=True):
                param.grad = gradient
            self._optimizer.step()
        finally:
            for param, gradient in zip(self.params, before, strict=True):
                param.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._optimizer.state_dict()["state"], "options": self.options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for index in state_dict["state"]:
            if type(index) is int and index not in range(len(self.params)):  # others are of no parameter
                raise ValueError(f"the state dict has state for parameter {index} of {len(self.params)}")
        options = {**self.options, **self._checked(state_dict["options"])}
        group = {**options, "params": list(range(len(self.params)))}
        state = copy.deepcopy(state_dict["state"])  # torch goes on with the tensors that it is given
        self._optimizer.load_state_dict({"state": state, "param_groups": [group]})

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self._optimizer.param_groups[0].items() if name != "params"}

    @options.setter
    def options(self, options: Mapping[str, Any]) -> None:
        self._optimizer.param_groups[0].update(self._checked(options))

    def _checked(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in options:
            if name not in self.options:
                raise ValueError(
                    f"{type(self._optimizer).__name__} has no option {name!r}; it has {', '.join(self.options)}"
                )
        return options
