"""The class form of PyTorch's recipe "Distributed Optimizer with TorchScript support", with the interface of Shoal's
own form.

Such a class takes the list of parameters and the options, keeps its state itself, and has ``step(gradients)``. It may
be plain Python, `torch.jit.script`ed, or have a `torch.compile`d step. Each runs unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, List, Optional  # noqa: UP035 - TorchScript reads the annotations of _Scripted

import torch
from torch import Tensor, nn

from shoal.functional._torch import is_scripted
from shoal.functional.bound import BoundOptimizer


def check_recipe(optimizer: type) -> None:
    """Refuses a class that does not have the recipe's form.

    Raises:
        TypeError: if it does not. The message says what is missing.
    """
    form = f"{optimizer.__qualname__} is neither a FunctionalOptimizer nor of the form __init__(params, …), "
    form += "step(gradients): "
    step = getattr(optimizer, "step", None)
    if issubclass(optimizer, torch.optim.Optimizer):
        raise TypeError(form + "it is a torch.optim.Optimizer, which finds gradients in .grad. Register what updates")
    if not callable(step):
        raise TypeError(form + "it has no method step(gradients)")
    _check_call(form + "step", step, 1)
    _check_call(form + "__init__", optimizer.__init__, 1)


def _check_call(what: str, function: Any, given: int) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without self
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional:
        raise TypeError(f"{what} takes no argument but self")
    if what.endswith("step"):
        required = [p.name for p in positional[given:] if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
        if required:
            raise TypeError(f"{what} needs {', '.join(required)} besides the gradients")


class BoundRecipe(BoundOptimizer):
    """An instance of the recipe's class form.

    As in the recipe, its state is ``.state``, a dict from each parameter to tensors by name, and its options are the
    dict ``.defaults``. A class that keeps them elsewhere can be stepped nevertheless; its state can be saved if it has
    ``state_dict`` and ``load_state_dict`` of its own.
    """

    def __init__(self, optimizer: type, params: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        self.params = list(params)
        self._instance = optimizer(self.params, *args, **kwargs)
        # An instance of a scripted class is still Python. It runs without the interpreter only inside a scripted
        # module.
        self._script = is_scripted(optimizer)
        self._module = torch.jit.script(_Scripted(self._instance)) if self._script else None

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        if len(gradients) != len(self.params):
            raise ValueError(f"one gradient, or None, per parameter: got {len(gradients)} for {len(self.params)}")
        if self._module is None:
            self._instance.step(list(gradients))
        else:
            self._module(list(gradients))

    def state_dict(self) -> dict[str, Any]:
        self._pull()
        if hasattr(self._instance, "state_dict"):
            own: dict[str, Any] = self._instance.state_dict()
            return own
        places = {id(param): index for index, param in enumerate(self.params)}
        state = {places[id(param)]: dict(entry) for param, entry in self._dict("state").items()}
        return {"state": state, "options": self.options}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._pull()
        if hasattr(self._instance, "load_state_dict"):
            self._instance.load_state_dict(state_dict)
        else:
            state, loaded = self._dict("state"), self._loaded(state_dict["state"])
            self._change(state_dict["options"])
            state.clear()
            state.update(loaded)
        self._push()

    def _loaded(self, entries: Mapping[int, Mapping[str, Any]]) -> dict[Tensor, dict[str, Tensor]]:
        """The state of a state dict. Raises ValueError if it is no state of these parameters."""
        loaded: dict[Tensor, dict[str, Tensor]] = {}
        for index, entry in entries.items():
            if index not in range(len(self.params)):
                raise ValueError(f"the state dict has state for parameter {index} of {len(self.params)}")
            mine = loaded[self.params[index]] = {}
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    mine[name] = value.clone()
                elif isinstance(value, Real):
                    mine[name] = torch.tensor(float(value))
                elif value is not None:  # torch has saved None for a buffer that was not there yet
                    raise ValueError(
                        f"state {name!r} of parameter {index} is {value!r:.80}, expected a tensor or a number"
                    )
        return loaded

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._dict("defaults"))

    @options.setter
    def options(self, options: Mapping[str, Any]) -> None:
        self._pull()
        self._change(options)
        self._push()

    def _change(self, options: Mapping[str, Any]) -> None:
        defaults = self._dict("defaults")
        for name in options:
            if name not in defaults:
                raise ValueError(
                    f"{type(self._instance).__name__} has no option {name!r}; it has {', '.join(defaults)}"
                )
        defaults.update(options)

    def _dict(self, name: str) -> dict[Any, Any]:
        found = getattr(self._instance, name, None)
        if not isinstance(found, dict):
            raise TypeError(
                f"{type(self._instance).__name__} has no dict .{name}, where the recipe keeps its "
                f"{'options' if name == 'defaults' else 'state'}: give it one, or state_dict() and load_state_dict()"
            )
        return found

    # A scripted module works on copies of its optimizer's attributes. Reading an attribute copies it back.

    def _pull(self) -> None:
        if self._module is not None:
            for name in vars(self._instance):
                setattr(self._instance, name, getattr(self._module.optimizer, name))

    def __getstate__(self) -> dict[str, Any]:
        self._pull()
        return {**vars(self), "_module": None}  # a copy makes its own

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self._push()

    def _push(self) -> None:
        if self._script:
            self._module = torch.jit.script(_Scripted(self._instance))


class _Scripted(nn.Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self, gradients: List[Optional[Tensor]]) -> None:  # noqa: UP006, UP045
        self.optimizer.step(gradients)
