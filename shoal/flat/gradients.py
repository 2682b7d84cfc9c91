"""Gradients that live in flat memory: the views, and how they stay the parameters' `.grad`.

Nobody but torch itself says whether a parameter has a gradient: `parameter.grad` is its view, or None. What torch puts
there instead is brought home at two moments:

* autograd gives a parameter without a gradient the incoming tensor itself: a hook moves it into the view at once;
* `DistributedDataParallel(gradient_as_bucket_view=True)` points `.grad` into its buckets, in part when a parameter is
  ready and in part in a callback at the end of backward: a callback after that one moves them back.

The hooks are all that is put on a user's parameters. They hold nothing alive; torch neither copies nor pickles them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor, distributed

grad_of: Callable[[Tensor], Tensor | None] = vars(torch._C.TensorBase)["grad"].__get__
"""`tensor.grad` without the lookup of the name."""

_strided = torch.strided
_graph_task = torch._C._current_graph_task_id
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


class GradientHook:
    """Runs after autograd has accumulated into a parameter's `.grad`. Does nothing once its home is gone."""

    __slots__ = ("home", "index")

    def __init__(self, home: weakref.ref[GradientViews], index: int) -> None:
        self.home = home
        self.index = index

    def __call__(self, parameter: Tensor) -> None:
        """Moves the gradient home.

        Not if it has a graph of its own (`create_graph=True`): then it is moved later. Not if the parameter has another
        dtype or device than its flat memory either: then whoever asks for the flat gradient hears of it.
        """
        home = self.home()
        if home is None:
            return
        grad, view = parameter.grad, home.views[self.index]
        if grad is not view and grad is not None and not grad.requires_grad and _fits(grad, view):
            view.copy_(grad if grad.layout is _strided else grad.to_dense())
            parameter.grad = view
        if (task := _graph_task()) != home.task:
            home.watch(task)


class GradientViews:
    """The views of flat memory that are the gradients of some parameters.

    Args:
        parameters: what the gradients are of. Each is given a hook, and loses that of an older `GradientViews`.
        views: one per parameter, of its shape, dtype, device and strides.
    """

    def __init__(self, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.views = list(views)
        self.task = -1
        """The backward pass that was last seen, by autograd's number for it."""
        self.settled = False
        """Whether an optimizer is between its look at the gradients and the end of its step."""
        home = weakref.ref(self)
        for index, parameter in enumerate(self.parameters):
            release(parameter)
            if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                _attach(parameter, GradientHook(home, index))

    def bring_home(self, indices: Sequence[int]) -> None:
        """Copies gradients that are elsewhere into their views, and makes the views the parameters' `.grad`.

        Raises:
            ValueError: if a gradient is of another shape or dtype or on another device than its flat memory.
        """
        views, grads = [], []
        for index in indices:
            view, grad = self.views[index], self.parameters[index].grad
            assert grad is not None
            if not _fits(grad, view):
                raise ValueError(
                    f"parameter {index} has a gradient of {grad.dtype} and shape {tuple(grad.shape)} on {grad.device}, "
                    f"but its flat memory is of {view.dtype} and shape {tuple(view.shape)} on {view.device}: was the "
                    "model moved or converted? Make a new ContiguousParams and a new optimizer after that"
                )
            views.append(view)
            grads.append(grad.detach() if grad.layout is _strided else grad.detach().to_dense())
        torch._foreach_copy_(views, grads)
        for index, view in zip(indices, views, strict=True):
            self.parameters[index].grad = view

    def strays(self) -> Iterator[int]:
        """Which parameters have a gradient that is not their view."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is not None and grad is not view:
                yield index

    def watch(self, task: int) -> None:
        """Called at the first gradient of a backward pass."""
        self.task = task
        self.settled = False
        if distributed.is_available() and distributed.is_initialized():
            # The engine runs callbacks in their order, those that callbacks add included. DDP adds its own with the
            # last gradient, so a callback that is added by ours comes after it.
            _at_end_of_backward(partial(_at_end_of_backward, self._end_of_backward))

    def _end_of_backward(self) -> None:
        if all(map(is_, map(grad_of, self.parameters), self.views)):
            return
        strays = [index for index in self.strays() if _fits(self.parameters[index], self.views[index])]
        if strays:
            self.bring_home(strays)


def _fits(tensor: Tensor, view: Tensor) -> bool:
    return tensor.dtype is view.dtype and tensor.shape == view.shape and tensor.device == view.device


def home_of(parameter: Tensor) -> tuple[GradientViews, int] | None:
    """Where the gradient of a parameter lives, and its number there; None if it is an ordinary one."""
    for hook in _hooks(parameter).values():
        if type(hook) is GradientHook and (home := hook.home()) is not None:
            return home, hook.index
    return None


def release(parameter: Tensor) -> None:
    """Makes a parameter an ordinary one again, as far as its gradient goes."""
    hooks = _hooks(parameter)
    for key in [key for key, hook in hooks.items() if type(hook) is GradientHook]:
        del hooks[key]


def _hooks(parameter: Tensor) -> dict[int, object]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _attach(parameter: Tensor, hook: GradientHook) -> None:
    frozen = not parameter.requires_grad
    if frozen:  # torch takes no hook then, but keeps one: the parameter may be trained later
        parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
