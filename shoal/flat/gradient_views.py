"""Gradients of parameters in flat memory: where they may lie, and how they get there.

Only torch itself says whether a parameter has a gradient: `parameter.grad` is a tensor, or None. The tensor may lie
anywhere: where autograd has put it, in a bucket of `DistributedDataParallel`, or where a user has put it. Code that
needs the flat gradient first gathers the gradients; from then on the views of flat memory are the parameters' `.grad`.

Small gradients on the CPU need no copy. Autograd gives a parameter without a gradient a new tensor, but adds to a
gradient that exists. Adding to a view of zeros costs less than allocating, keeping and copying a tensor. So, when the
first parameter of a backward pass gets its gradient, all others without a gradient get their views, which one kernel
clears. At the end of the pass, views that autograd has not written to are removed again. All this needs one hook on one
parameter.

The views are cleared to -0.0, because -0.0 plus any number is that number to the bit. A view that does not begin with
-0.0 has been written to, and one kernel checks this for all views. If a doubt remains, the views' versions decide.

Large gradients stay where autograd puts them: an optimizer's fused kernel reads them there (`stand_in`). Clearing or
copying them would cost another pass over memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling

from shoal.flat._torch import call_after_backward, foreach_copy_, foreach_zero_, grad_of, version_of

_strided = torch.strided

LARGE: Final = 1 << 18
"""Bytes. From this size on, one more tensor for a fused kernel costs less than clearing or copying the gradient first:
measured by `benchmarks.contiguous` with layers of 128 to 1,000.
"""


def is_large(tensor: Tensor) -> bool:
    """Whether the gradient of this parameter stays where autograd puts it."""
    return tensor.nbytes >= LARGE


def set_grads(parameters: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
    """Sets the gradients of the parameters; None for ``grads`` drops them."""
    for parameter, grad in zip(parameters, repeat(None) if grads is None else grads):  # noqa: B905  # repeat has no end
        parameter.grad = grad


class GradientViews:
    """The views of flat memory that are, or can become, the gradients of some parameters.

    Args:
        parameters: the parameters of these gradients. They leave an older `GradientViews`.
        views: one view per parameter, with its shape, dtype, device and strides, and a version counter of its own.
        cleared: parts of flat memory that hold the views of all small parameters, and of no others.
        samples: flat memory as integers of the same size, and the indices where small parameters begin in it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        views: Sequence[Tensor],
        cleared: Sequence[Tensor],
        samples: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.parameters = list(parameters)
        self.views = list(views)
        self._ids = set(map(id, views))
        self._cleared = list(cleared)
        small = [
            index
            for index, view in enumerate(views)
            if not is_large(view) and view.device.type == "cpu" and (view.is_floating_point() or view.is_complex())
        ]
        self._parameters = [parameters[index] for index in small]
        self._views = [views[index] for index in small]
        sampled = sum(starts.numel() for _, starts in samples)
        self._samples = samples if sampled == len(small) else []
        """Empty if a small parameter is empty or complex."""
        # C++ code holds each view for good. A tensor that only Python holds changes its owner when it becomes a
        # `.grad`, and again when it stops being one: 0.1 to 0.2 µs for both.
        self._keepers = [view.detach() for view in views]
        set_grads(self._keepers, views)
        self._placed: list[int] | None = None
        """During a backward pass in which views were placed: their versions at that moment, and -1 for parameters that
        had a gradient.
        """
        self._marked = False
        """Whether all views were cleared to -0.0."""
        self.kept: list[Tensor] = []
        """Large gradients that were copied, kept until gradients are dropped. If they were freed right after the copy,
        page faults would take a fifth of the time of the next backward pass (ResNet-18).
        """
        self._nodes: list[Any] = []
        self._hooks: list[Any] = []
        self._misses = 0
        for parameter in self.parameters:
            if (old := home_of(parameter)) is not None:
                old.retire()
            _homes[id(parameter)] = self
        self._look_for_the_first()

    def bring_home(self, indices: Sequence[int]) -> None:
        """Copies gradients that lie elsewhere into their views, and makes the views the parameters' `.grad`.

        Raises:
            ValueError: if a gradient has another shape, dtype or device than its flat memory.
        """
        for index in indices:
            view, grad = self.views[index], self.parameters[index].grad
            assert grad is not None
            if not fits(grad, view):
                raise ValueError(
                    f"parameter {index} has a gradient of {grad.dtype} and shape {tuple(grad.shape)} on {grad.device}, "
                    f"but its flat memory is of {view.dtype} and shape {tuple(view.shape)} on {view.device}: was the "
                    "model moved or converted? Make a new ContiguousParams and a new optimizer after that"
                )
        views = [self.views[index] for index in indices]
        self.free(views)
        given = [grad.detach() for index in indices if (grad := self.parameters[index].grad) is not None]
        grads = [grad if grad.layout is _strided else grad.to_dense() for grad in given]
        foreach_copy_(views, grads)
        self.kept = list(filter(is_large, grads))
        set_grads([self.parameters[index] for index in indices], views)
        if 2 * len(views) > len(self._views) > 0:
            self._misses += 1
            if self._misses & (self._misses - 1) == 0:  # less and less often, in case it does not help
                self._look_for_the_first()

    def free(self, views: Sequence[Tensor]) -> None:
        """To be called before writing to these views: a parameter whose gradient is another parameter's view gets a
        copy of it.
        """
        written = set(map(id, views))
        if written.isdisjoint(map(id, map(grad_of, self.parameters))):
            return
        for parameter, own in zip(self.parameters, self.views, strict=True):
            if (grad := grad_of(parameter)) is not None and grad is not own and id(grad) in written:
                parameter.grad = grad.clone()

    def strays(self) -> Iterator[int]:
        """The indices of the parameters that have a gradient which is not their view."""
        self.settle()
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is not None and grad is not view:
                yield index

    def settle(self) -> None:
        """Removes the views from the parameters that got no gradient in the last backward pass.

        Autograd calls this at the end of the pass. If the pass failed, the next reader of the gradients calls it.
        """
        placed, self._placed = self._placed, None
        if placed is None or (self._marked and not any(map(_has_mark, self._samples))):
            return
        for parameter, view, version in zip(self._parameters, self._views, placed, strict=True):
            if version_of(view) == version and parameter.grad is view:
                parameter.grad = None

    def place(self, first: int) -> None:
        """Called when the first small parameter has its gradient: clears the views, and gives them to all others
        without a gradient.

        It does nothing if gradients get a graph (`create_graph=True`), because autograd then adds out of place. It does
        nothing in a process group either, because `DistributedDataParallel(gradient_as_bucket_view=True)` needs its own
        views in `.grad`, or None.
        """
        if torch.is_grad_enabled() or (distributed.is_available() and distributed.is_initialized()):
            return
        self.settle()
        self.kept.clear()
        parameters, views = self._parameters, self._views
        grad, view = grad_of(parameters[first]), views[first]
        if grad is None or not fits(grad, view):
            return  # the model was moved: the next reader of the flat gradient gets an error
        # One loop, because touching all tensors is the main cost.
        placed = []
        for parameter, own in zip(parameters, views, strict=True):
            if parameter.grad is None:
                parameter.grad = own
                placed.append(version_of(own))
            else:
                placed.append(-1)
        there = placed.count(-1)
        if there == len(placed):
            return
        if only_first := there == 1 and grad is not view:
            if id(grad) in self._ids:  # another parameter's view, which the next lines clear
                grad = grad.clone()
            for part in self._cleared:
                part.fill_(-0.0)
            view.copy_(grad if grad.layout is _strided else grad.to_dense())
            parameters[first].grad = view
        else:
            cleared = [own for own, version in zip(views, placed, strict=True) if version >= 0]
            self.free(cleared)
            foreach_zero_(cleared)
            placed = [version_of(own) if version >= 0 else -1 for own, version in zip(views, placed, strict=True)]
        self._placed, self._marked = placed, only_first and bool(self._samples)
        call_after_backward(self.settle)

    def retire(self) -> None:
        """Leaves the gradients alone from now on, because other flat memory has some of the parameters."""
        self._placed = None
        self._parameters = self._views = []
        self._forget_hooks()

    def _look_for_the_first(self) -> None:
        """Lets the next backward pass find the small parameter that gets its gradient first.

        In that pass only, every small parameter has a hook, on its node in the graph. Each forward pass makes new nodes
        unless somebody keeps them, so the nodes are kept until then.
        """
        if self._nodes or (distributed.is_available() and distributed.is_initialized()):
            return
        self._forget_hooks()
        home = weakref.ref(self)
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                self._hooks.append(node.register_hook(partial(_is_first, home, number)))

    def found(self, number: int) -> None:
        """Called by the hook of the parameter that is first."""
        if self._nodes:
            self._forget_hooks()
            hook = partial(_has_gradient, weakref.ref(self), number)
            self._hooks.append(self._parameters[number].register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            self.place(number)

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()


def _is_first(home: weakref.ref[GradientViews], number: int, *_: object) -> None:
    if not is_dynamo_compiling() and (views := home()) is not None:
        views.found(number)


def _has_gradient(home: weakref.ref[GradientViews], number: int, _: Tensor) -> None:
    if not is_dynamo_compiling() and (views := home()) is not None:
        views.place(number)


def _has_mark(sample: tuple[Tensor, Tensor]) -> bool:
    """Whether one of the views begins with -0.0, and so may not have been written to."""
    integers, starts = sample
    return int(integers.index_select(0, starts).min()) == torch.iinfo(integers.dtype).min


def fits(tensor: Tensor, view: Tensor) -> bool:
    """Whether a gradient has the dtype, shape and device of this flat memory."""
    return tensor.dtype is view.dtype and tensor.shape == view.shape and tensor.device == view.device


_homes: weakref.WeakValueDictionary[int, GradientViews] = weakref.WeakValueDictionary()
"""The `GradientViews` of each parameter, by the parameter's id. The `GradientViews` keeps the parameter alive."""


def home_of(parameter: Tensor) -> GradientViews | None:
    """The `GradientViews` of a parameter; None if the parameter is an ordinary one."""
    return _homes.get(id(parameter))
