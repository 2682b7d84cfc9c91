"""Steps of an optimizer in which its closure is a stand-in: it returns a loss that is known already.

Most classes call their closure once, before anything else, and return the loss or read it; for them such a step is that
of a process with all the batches. Some call it again, or after they have moved the parameters (SAM), for the gradients
that it would leave. Nothing in a class says so. So the stand-in looks, and raises.

[Note: everything as it was]
What a step with the run's loss may change is copied before it: parameters, state and options are what they were when
the error is raised. The copy is made before each such step, because a class may call its closure twice in every tenth
step only (LookSAM). It costs the memory of parameters and state for the time of the step, and the time to copy these,
once in an epoch. Before inner steps (in a cluster, or with a scaler) it is made once, before the first: it would cost
too much before each. Classes of torch and of Shoal are known to call their closure once, and cost nothing; LBFGS is
refused when it is made.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shoal.cluster.whole import local
from shoal.flat import grad_of, parameters_of
from shoal.flat.allocation import memory_for
from shoal.optim._torch import foreach_norm, writes_of
from shoal.optim.closures import Closure, as_returned, call_step, calls_once, takes_closure
from shoal.optim.tree import copy_of
from shoal.swarm.protocol.loss import Loss

EPOCHS = (
    "its step here is made with the averaged gradients and the run's loss of an epoch. Train with "
    "outer=shoal.DiLoCo(…) or use_local_updates=True, where its step gets the closure itself, or choose another "
    "optimizer"
)
EARLY = (
    "with cluster= or grad_scaler=, step has called the closure before, because the gradients are needed then. Leave "
    "these out, or choose another optimizer"
)


NO_GRAPH = "does not require grad and does not have a grad_fn"  # as autograd says it


class NeedsGraph(RuntimeError):
    """A wrapped optimizer wants to differentiate gradients, which are averages of peers."""


@contextlib.contextmanager
def of_averages(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, an optimizer makes its step with averages of gradients. Some classes (AdaHessian, SophiaH) would
    differentiate these, as after `backward(create_graph=True)`, before they change anything.

    Raises:
        NeedsGraph: if it does.
    """
    try:
        yield
    except RuntimeError as error:
        if NO_GRAPH not in str(error):
            raise
        raise NeedsGraph(
            f"{type(optimizer).__name__} differentiates the gradients (backward(create_graph=True)), and its step here "
            "is made with the averages of the peers' gradients, which have no graph. Train with outer=shoal.DiLoCo(…) "
            "or use_local_updates=True, where it gets this peer's own gradients, or choose another optimizer"
        ) from error


class ClosureCalledAgain(RuntimeError):
    """A wrapped optimizer wants to evaluate the loss itself, where it can't."""


class LossSteps:
    """Makes the steps of one optimizer that have a closure.

    Args:
        optimizer: the optimizer.
        of_epochs: whether these are the steps at the ends of epochs. Otherwise they are inner steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, of_epochs: bool) -> None:
        self._optimizer, self._of_epochs = optimizer, of_epochs
        self._is_known = False  # whether an inner step has gone well

    def make(
        self,
        closure: Closure,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Make an inner step with a closure.

        Args:
            closure: the user's closure. If nobody has called it yet, the optimizer does so.
            around: makes the context of such a call.

        Raises:
            ClosureCalledAgain: if the closure was called, and the step would call it twice, or after it has written to
                a parameter or a gradient. In the first such step, everything is as it was.
        """
        if closure.is_evaluated:
            self.make_with(closure.returned)
        else:
            closure.step(self._optimizer, around)

    @torch.no_grad()
    def make_with(self, returned: Any) -> None:
        """Make a step with the gradients in `.grad`.

        Args:
            returned: what the stand-in returns, or the run's `Loss`.

        Raises:
            ClosureCalledAgain: as `make`. At the end of an epoch everything is always as it was.
            MemoryError: if there is no memory for the copy. Then nothing has changed.
        """
        optimizer, made = self._optimizer, type(self._optimizer)
        if isinstance(returned, Loss):
            returned = as_returned(returned, optimizer.param_groups[0]["params"][0].device)
        if not takes_closure(made) or calls_once(made):
            call_step(optimizer, lambda: returned)
            return
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
        kept = None
        if not self._is_known:
            what = f"a copy of parameters and state, by which a step of {made.__name__} with a closure can be undone"
            with memory_for(what, MemoryError):
                kept = _Kept(optimizer, trained)
        stand_in = _StandIn(optimizer, trained, returned, kept, EPOCHS if self._of_epochs else EARLY)
        try:
            with stand_in.after_hooks():
                call_step(optimizer, stand_in)
            if stand_in.error is not None:  # the class has caught it
                raise stand_in.error
        except BaseException:
            if kept is not None:
                kept.put_back()
            raise
        self._is_known = not self._of_epochs


class _Kept:
    """A copy of what a step may change: the parameters, the state and the options of an optimizer, and those of
    optimizers that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> None:
        self._parameters = [(tensor, tensor.clone()) for tensor in (local(p).detach() for p in trained)]
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen = set(map(id, parameters_of(optimizer)))
        rows = [list(one) if isinstance(one, list | tuple) else [one] for one in vars(optimizer).values()]
        held = [one for row in rows for one in row if isinstance(one, torch.optim.Optimizer)]
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
                    self._tensors.append((value, copy_of(value.detach())))
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
    """What the wrapped optimizer gets as its closure.

    Args:
        optimizer: the wrapped optimizer.
        trained: its parameters.
        returned: what this returns.
        kept: a copy of everything, or None.
        why_not: why the optimizer can't evaluate the loss here, and what to do.

    Attributes:
        error: the error that it has raised, or None.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: list[Tensor], returned: Any, kept: _Kept | None, why_not: str
    ) -> None:
        self._optimizer, self._trained, self._returned = optimizer, trained, returned
        self._kept, self._why_not = kept, why_not
        self._was_called = False
        self.error: ClosureCalledAgain | None = None
        self._look()

    def _look(self, *_: object) -> None:
        """Note the gradients with which the step begins."""
        self._gradients, self._writes = self._present(), list(map(writes_of, self._trained))

    def _present(self) -> tuple[list[Tensor], list[int], list[float]]:
        """The gradients, how often each was written, and their norms, which tell of writes through `.data`. Without
        a copy of everything there are no norms, to save time."""
        found = [grad for grad in map(grad_of, self._trained) if grad is not None]
        dense = [local(grad) for grad in found if not grad.is_sparse] if self._kept is not None else []
        return found, list(map(writes_of, found)), list(map(float, foreach_norm(dense))) if dense else []

    def _are_gradients_written(self) -> bool:
        now, before = self._present(), self._gradients
        return list(map(id, now[0])) != list(map(id, before[0])) or now[1:] != before[1:]

    def _are_parameters_written(self) -> bool:
        return list(map(writes_of, self._trained)) != self._writes or (
            self._kept is not None and self._kept.are_parameters_written
        )

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

    def __call__(self) -> Any:
        why = ""
        if self._was_called:
            why = "a second time"
        elif self._are_gradients_written():
            why = "after it has written to gradients"
        elif self._are_parameters_written():
            why = "after it has written to parameters"
        if why:
            undone = "" if self._kept is None else ". Parameters and state are as before the step"
            self.error = ClosureCalledAgain(
                f"{type(self._optimizer).__name__} calls its closure {why}, to evaluate the loss itself, and "
                f"{self._why_not}{undone}"
            )
            raise self.error
        self._was_called = True
        return self._returned
