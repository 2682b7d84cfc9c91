"""The closures of `Optimizer.step(closure)`: who calls the user's, and what the wrapped optimizer gets in its place.

[Note: whose closure the wrapped optimizer gets]
Where a step of the wrapped optimizer is a step of this peer alone (local updates, the inner steps of DiLoCo), it gets
the user's closure, and calls it as often as it likes. Elsewhere its step uses the average of many batches, of many
peers. A second evaluation of the loss would have to be made by all of them, at parameters that only the optimizer
knows. So it gets a stand-in, which returns the run's loss: one number, the same at all peers. (Each peer's own loss
would make like peers differ.) Most classes call their closure once, before anything else, and return the loss or read
it; for them that is the step of a process with all the batches. Some call it again, or after they have moved the
parameters (SAM). Nothing in a class says so. So the stand-in looks, and everything that such a step may have changed
was copied before it: parameters, state and options are what they were when the error is raised.

The copy is made before each step with a closure, because a class may call it twice in every tenth step only (LookSAM).
It costs the memory of parameters and state for the time of the step, and the time to copy that once in an epoch.
Classes of torch and of Shoal are known to call their closure once, and cost nothing; LBFGS is refused when it is made.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.flat import FlatBuffer, users_modes
from shoal.flat.allocation import memory_for
from shoal.interrupts import users_handlers
from shoal.optim._torch import foreach_norm, writes_of
from shoal.optim.plain import plain_or
from shoal.swarm.protocol.loss import LARGEST, Loss, LossKind

KINDS = {
    torch.float16: LossKind.FLOAT16,
    torch.bfloat16: LossKind.BFLOAT16,
    torch.float32: LossKind.FLOAT32,
    torch.float64: LossKind.FLOAT64,
}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


class ClosureCalledAgain(RuntimeError):
    """A wrapped optimizer wants to evaluate the loss itself, where it can't."""


class NotUsed(Exception):
    """The samples of this step do not count. If the closure has left no gradient, this ends the step of the wrapped
    optimizer. It does not leave `Accumulation`."""


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
        value: Any = float(given.detach())
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
    """Whether it is known that the step of a class calls its closure once, before anything else. That is so for the
    classes of torch but LBFGS, and those of Shoal."""
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


def refuse_early(made: type[torch.optim.Optimizer], because: str) -> None:
    """Refuse a closure that `Optimizer.step` would have to call before the wrapped optimizer's own step.

    Args:
        made: the class of the wrapped optimizer.
        because: what makes that necessary.

    Raises:
        ValueError: if it is not known that the class calls its closure once.
    """
    if takes_closure(made) and not calls_once(made):
        raise ValueError(
            f"step(closure) with {because}: {made.__name__} would call the closure in its own step, and {because} "
            f"needs the gradients before it: leave {because} out, or call backward() before step() and give no closure"
        )


# -- the stand-in


@torch.no_grad()
def step_with_loss(optimizer: torch.optim.Optimizer, loss: Loss, memory: FlatBuffer) -> None:
    """Make a step with the gradients in `.grad`, in which the closure returns `loss`.

    Args:
        optimizer: the optimizer.
        loss: the run's loss.
        memory: the flat memory of its parameters.

    Raises:
        ClosureCalledAgain: if the step calls its closure twice, or after it has written to a parameter or a gradient.
            As after every error here, parameters, state and options are what they were.
        MemoryError: if there is no memory for a copy of these. Then nothing has changed.
    """
    made = type(optimizer)
    device = memory.flat[0].device
    if not takes_closure(made) or calls_once(made):
        call_step(optimizer, lambda: as_returned(loss, device))
        return
    what = f"a copy of parameters and state: a step of {made.__name__} with a closure is undone if it calls it again"
    with memory_for(what, MemoryError):
        kept = _Kept(optimizer, memory)
    stand_in = _StandIn(optimizer, as_returned(loss, device), kept)
    try:
        with stand_in.after_hooks():
            call_step(optimizer, stand_in)
        if stand_in.error is not None:  # the class has caught it
            raise stand_in.error
    except BaseException:
        kept.put_back()
        raise


class _Kept:
    """A copy of what a step may change: the parameters, the state and the options of an optimizer, and those of
    optimizers that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, memory: FlatBuffer) -> None:
        self._parameters = [(flat, flat.clone()) for flat in memory.flat]
        self._tensors: list[tuple[Tensor, Tensor]] = []
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._seen = own  # copied with the flat memory, or frozen
        held = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
        self._optimizers = [
            (one.param_groups, [self._copy(group) for group in one.param_groups], one.state, self._copy(one.state))
            for one in (optimizer, *held)
            if isinstance(one.state, dict)
        ]

    def _copy(self, value: Any) -> Any:
        """A copy of the containers; the tensors in them are the same ones, and are copied beside."""
        match value:
            case Tensor():
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._tensors.append((value, value.detach().clone()))
                return value
            case dict():
                copied = copy.copy(value)
                copied.update({key: self._copy(one) for key, one in value.items()})
                return copied
            case list() | deque():
                row = copy.copy(value)
                for place, one in enumerate(value):
                    row[place] = self._copy(one)
                return row
            case tuple() if type(value) is tuple:
                return tuple(map(self._copy, value))
            case set():
                return copy.copy(value)
        return value

    @property
    def are_parameters_written(self) -> bool:
        """Whether the parameters differ from the copy."""
        return not all(
            torch.equal(now, before) or torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)
            for now, before in self._parameters
        )

    def put_back(self) -> None:
        """Set everything to its copy."""
        for tensor, before in (*self._parameters, *self._tensors):
            tensor.copy_(before)
        for groups, options, state, values in self._optimizers:
            for group, before in zip(groups, options, strict=False):
                group.clear()
                group.update(before)
            state.clear()
            state.update(values)


class _StandIn:
    """What the wrapped optimizer gets as its closure."""

    def __init__(self, optimizer: torch.optim.Optimizer, returned: Tensor | float, kept: _Kept) -> None:
        self._optimizer, self._returned, self._kept = optimizer, returned, kept
        self._was_called = False
        self.error: ClosureCalledAgain | None = None
        self._look()

    def _look(self, *_: object) -> None:
        """Note the gradients with which the step begins."""
        self._gradients = self._present()

    def _present(self) -> tuple[list[Tensor], list[int], list[float]]:
        """The gradients, how often each was written, and their norms, which tell of writes through `.data`."""
        found = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = foreach_norm([grad for grad in found if not grad.is_sparse]) if found else ()
        return found, [writes_of(grad) for grad in found], list(map(float, norms))

    def _are_gradients_written(self) -> bool:
        now, before = self._present(), self._gradients
        return list(map(id, now[0])) != list(map(id, before[0])) or now[1:] != before[1:]

    @contextlib.contextmanager
    def after_hooks(self) -> Iterator[None]:
        """Within this context, what hooks before the step write into gradients counts as theirs."""
        try:
            hook = self._optimizer.register_step_pre_hook(self._look)
        except AttributeError:  # a class that does not call the constructor of torch's calls no hooks either
            yield
            return
        try:
            yield
        finally:
            hook.remove()

    def __call__(self) -> Tensor | float:
        why = ""
        if self._was_called:
            why = "a second time"
        elif self._are_gradients_written():
            why = "after it has written to gradients"
        elif self._kept.are_parameters_written:
            why = "after it has written to parameters"
        if why:
            self.error = ClosureCalledAgain(
                f"{type(self._optimizer).__name__} calls its closure {why}, to evaluate the loss itself, and its step "
                "here is made with the averaged gradients and the run's loss of an epoch. Parameters and state are as "
                "before the step. Train with outer=shoal.DiLoCo(…) or use_local_updates=True, where its step gets the "
                "closure itself, or choose another optimizer"
            )
            raise self.error
        self._was_called = True
        return self._returned
