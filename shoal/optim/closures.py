"""The closures of `Optimizer.step(closure)`: who calls the user's, and what the wrapped optimizer gets in its place.

[Note: whose closure the wrapped optimizer gets]
Where a step of the wrapped optimizer is a step of this peer alone (local updates, the inner steps of DiLoCo), it gets
the user's closure, and calls it as often as it likes. Elsewhere its step uses the average of many batches, of many
peers. A second evaluation of the loss would have to be made by all of them, at parameters that only the optimizer
knows. So it gets a stand-in, which returns the run's loss: one number, the same at all peers (`loss_steps`). Each
peer's own loss would make like peers differ. In a cluster and with a scaler, an inner step gets a stand-in, too: the
ranks have reduced the gradients, or the scaler has unscaled them, before the step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.flat import users_modes
from shoal.interrupts import users_handlers
from shoal.optim.plain import plain_or
from shoal.swarm.protocol.loss import LARGEST, Loss, LossKind

KINDS = {
    torch.float16: LossKind.FLOAT16,
    torch.bfloat16: LossKind.BFLOAT16,
    torch.float32: LossKind.FLOAT32,
    torch.float64: LossKind.FLOAT64,
}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


class NotUsed(Exception):
    """The samples of this step do not count. If the closure has left no gradient, this ends the step of the wrapped
    optimizer. It does not leave `Work.add`."""


class Closure:
    """A user's closure in one call of `Optimizer.step`.

    Args:
        function: the closure; None if it was evaluated.
        returned: what it has returned then.

    Attributes:
        returned: what its last call has returned.
        is_evaluated: whether it was called.
        after_first: called after its first call, if the wrapped optimizer makes that.
    """

    def __init__(self, function: Callable[[], Any] | None, returned: Any = None) -> None:
        self._function, self.returned = function, returned
        self.is_evaluated = function is None
        self.after_first: Callable[[], None] = lambda: None
        self._result: tuple[Any, ...] = ()  # what the wrapped optimizer has returned, if it got this closure

    def evaluate(self) -> Any:
        """Call it, with gradients enabled and in the user's modes. Returns what it returns."""
        assert self._function is not None
        with users_handlers(), users_modes(), torch.enable_grad():
            self.returned = self._function()
        self.is_evaluated = True
        return self.returned

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Make a step of the wrapped optimizer, which calls this closure itself.

        Args:
            optimizer: the wrapped optimizer.
            around: makes the context of each call.
        """

        def call() -> Any:
            is_first = not self.is_evaluated
            with around():
                self.evaluate()
            if is_first:
                self.after_first()
            return self.returned

        self._result = (call_step(optimizer, call),)

    def result(self) -> Any:
        """What `Optimizer.step` returns: the result of the wrapped optimizer's step if that got this closure, else that
        of the closure, which is called now if nobody has called it."""
        if self._result:
            return self._result[0]
        return self.returned if self.is_evaluated else self.evaluate()


# -- the loss of a closure, as peers tell it


def loss_of(given: object) -> Loss | None:
    """The loss that a closure has returned; None if that is no finite number. A tensor on a device makes this wait."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, Tensor):
        kind = KINDS.get(given.dtype)
        if kind is None or given.numel() != 1:
            return None
        try:
            value: Any = float(given.detach())
        except RuntimeError:  # tensors without numbers: meta, FakeTensorMode
            return None
    else:
        kind, value = LossKind.NUMBER, plain_or(given, otherwise=None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST[kind]:
        return None
    return Loss(float(value), kind)


def kept_loss(given: Any) -> Any:
    """What to keep of a loss until the end of the epoch. For a tensor on a device nobody waits; it is copied, because
    its memory may be written to again (CUDA graphs)."""
    is_on_device = isinstance(given, Tensor) and given.device.type != "cpu" and given.numel() == 1
    return given.detach().clone() if is_on_device else loss_of(given)


def as_returned(loss: Loss, device: torch.device) -> Tensor | float:
    """The loss as a closure returns it."""
    if loss.kind is LossKind.NUMBER:
        return loss.value
    return torch.tensor(loss.value, dtype=DTYPES[loss.kind], device=device)


# -- what is known of a class


def takes_closure(made: type[torch.optim.Optimizer]) -> bool:
    """Whether the step of a class has a parameter for a closure."""
    return _place_of_closure(made.step) is not None


def needs_closure(made: type[torch.optim.Optimizer]) -> bool:
    """Whether the step of a class can't be made without a closure, as that of LBFGS."""
    closure = inspect.signature(made.step).parameters.get("closure")
    needs = closure is not None and closure.default is inspect.Parameter.empty
    return needs or issubclass(made, torch.optim.LBFGS)


def calls_once(made: type[torch.optim.Optimizer]) -> bool:
    """Whether it is known that the step of a class calls its closure once, before anything else, and reads no loss.
    That is so for the classes of torch but LBFGS, and those of Shoal."""
    module = inspect.unwrap(made.step).__module__
    return module.startswith(("torch.optim.", "shoal.")) and not needs_closure(made)


@lru_cache(64)  # to look takes 20 µs
def _place_of_closure(step: Callable[..., Any]) -> bool | None:
    """Whether the closure is the first positional argument of a step; None if there is no place for it."""
    _, *parameters = inspect.signature(step).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if parameters and (parameters[0].name == "closure" or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        return parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
    named = any(parameter.name == "closure" for parameter in parameters)
    return False if named or inspect.Parameter.VAR_KEYWORD in kinds else None


def call_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
    """Make a step with a closure, if the class has a parameter for it, else without."""
    step: Callable[..., Any] = optimizer.step
    match _place_of_closure(type(optimizer).step):
        case None:
            return step()
        case True:
            return step(closure)
        case False:
            return step(closure=closure)
