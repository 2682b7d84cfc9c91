"""`ContiguousParams`: a model's parameters and gradients in flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shoal.flat import optimizer_state, replacement, step_hook
from shoal.flat.buffer import FlatBuffer, refuse_shared_memory
from shoal.flat.flat_parameter import FlatParameter, RunParameter
from shoal.flat.given import Given
from shoal.flat.gradient_views import LARGE, GradientViews, home_of
from shoal.flat.layout import Layout
from shoal.flat.memory_views import own_storage
from shoal.flat.modes import MADE_IN_INFERENCE, neutral
from shoal.flat.replacement import Places

_address_of = Tensor.data_ptr
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
_NEW = "Make a new ContiguousParams and a new optimizer"


class ContiguousParams:
    """Moves parameters into flat buffers, so that an optimizer steps one long tensor instead of many short ones.

        parameters = ContiguousParams(model.parameters())
        optimizer = torch.optim.Adam(parameters.contiguous())
        for x, y in data:
            loss = loss_of(model(x), y)
            loss.backward()
            clip_grad_norm_(parameters.contiguous(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            parameters.assert_buffer_is_valid()

    The parameters stay the same objects, with their values, gradients, shapes, strides (if dense: channels_last is
    kept), hooks and `requires_grad`. Their `.data` become views of one buffer per group, dtype and device. Their
    gradients may be views of a second buffer, or lie where autograd has put them. They are gathered when an optimizer
    needs the flat gradient, or when the `.grad` of a flat parameter from :meth:`contiguous` is read. Training gives the
    results of the per-parameter optimizer: a parameter without a gradient is skipped, and has a step count of its own.

    If the user chooses neither `fused` nor `foreach`, the optimizer uses torch's fused kernel. It is as exact as the
    other kernels, but rounds differently, by a few units in the last place. With `foreach=False`, float32 and float64
    numbers equal those of the per-parameter optimizer to the bit.

    Args:
        parameters: as for a torch optimizer: parameters, `(name, parameter)` pairs, or groups of either with options;
            or an `nn.Module`, for all of its parameters. A parameter that is given twice in a group counts once. Names
            are used in messages.

    Raises:
        TypeError: if something that should be a parameter is not a tensor.
        ValueError: if there are no parameters; if one is in two groups, is no leaf, is on the meta device, was made
            within `torch.inference_mode()`, belongs to a lazy module that has not run yet, or is sparse or of a tensor
            subclass such as DTensor; or if two share memory. Nothing is changed then.
    """

    @neutral
    def __init__(self, parameters: nn.Module | Iterable[Any]) -> None:
        self._given = given = Given.of(parameters)
        self._parameters = given.parameters
        for index in range(len(given.parameters)):
            _check(given, index)
        refuse_shared_memory(given.parameters)
        groups = [[given.parameters[index] for index in group] for group in given.groups]
        data = [FlatBuffer(Layout.of(group)) for group in groups]
        gradients = [FlatBuffer(buffer.layout) for buffer in data]
        self._views = [view for group, buffer in zip(groups, data, strict=True) for view in _views(buffer, group)]
        self._gradient_memory = [
            view for group, buffer in zip(groups, gradients, strict=True) for view in _views(buffer, group)
        ]
        # A second set of views, which stay in place when somebody moves the tensors that are `.grad`. They are made in
        # one go, so that they lie near each other: each step reads all of them.
        gradient_views = [view.data for view in self._gradient_memory]
        cleared = [part for buffer in gradients for part in _small_parts(buffer)]
        self._gradient_addresses = list(map(_address_of, gradient_views))
        with torch.no_grad():
            for view, parameter in zip(self._views, given.parameters, strict=True):
                view.copy_(parameter)
        samples = [sample for buffer in gradients for sample in _small_samples(buffer)]
        self._home = GradientViews(given.parameters, gradient_views, cleared, samples)
        self._point_at_memory()
        self._addresses = list(map(_address_of, given.parameters))
        self._flats = [
            _flat_parameters(list(group), values, grads, self._home)
            for group, values, grads in zip(given.groups, data, gradients, strict=True)
        ]
        self._places = Places(given.parameters)
        step_hook.install()
        replacement.install()

    def contiguous(self) -> list[Any]:
        """The parameters for an optimizer: one flat parameter per dtype and device, or groups of them with their
        options.

        Pass them to `clip_grad_norm_` too. If an optimizer had to split a flat parameter, because some of its
        parameters had no gradient in a step, this returns its parts from then on.

        Returns:
            1-D parameters, of the dtypes and on the devices of the given ones.
        """
        return self._given.like_given([[leaf for flat in flats for leaf in flat.leaves()] for flats in self._flats])

    def original(self) -> list[Any]:
        """The parameters, each once, in the order in which they were given; in groups if groups were given."""
        return self._given.like_given([[self._parameters[index] for index in group] for group in self._given.groups])

    def buffer_is_valid(self) -> bool:
        """Whether all parameters are in flat memory, and modules still hold them.

        A gradient may lie anywhere, or be None: the flat gradient is right whenever it is read. The only invalid
        gradient is a view of flat memory that was given other memory (`p.grad.data = …`). The check takes 0.2 to 0.3 µs
        per parameter, so it can run in every step.
        """
        return (
            self._places.replaced() is None
            and list(map(_address_of, self._parameters)) == self._addresses
            and list(map(_address_of, self._home.views)) == self._gradient_addresses
        )

    def assert_buffer_is_valid(self) -> None:
        """Raises an error unless :meth:`buffer_is_valid`.

        Raises:
            ValueError: if a parameter or gradient is not valid. The message names the first one, what happened to it,
                and the remedy: :meth:`make_params_contiguous`, or a new `ContiguousParams` and a new optimizer.
        """
        if self.buffer_is_valid():
            return
        self._check_repairable()
        index, what = self._moved()
        raise ValueError(
            f"the {what} of {self._given.label(index)} has left the flat memory (`.data = …`; only in-place "
            "operations keep it there). make_params_contiguous() copies it back"
        )

    @neutral
    def make_params_contiguous(self) -> None:
        """Moves parameters and gradients that have left flat memory back into it, with their present values.

        Optimizers continue as if nothing had happened.

        Raises:
            ValueError: if a parameter or gradient has another dtype, device or shape than before, or was replaced by
                another one. Then a new `ContiguousParams` and a new optimizer are needed, and nothing has changed.
        """
        self._check_repairable()
        for parameter, view, address in zip(self._parameters, self._views, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                view.copy_(parameter.detach())
        for view, memory in zip(self._home.views, self._gradient_memory, strict=True):
            if view.data_ptr() != memory.data_ptr():
                memory.copy_(view)
                view.data = memory
        self._point_at_memory()

    @neutral
    def original_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that `optimizer` would have if it had been made with :meth:`original`.

        It shares no memory with the optimizer. Any optimizer of the same class and the same parameters loads it.

        Args:
            optimizer: an optimizer of :meth:`contiguous`.

        Returns:
            A dictionary with "state" and "param_groups", as in torch.optim.

        Raises:
            ValueError: for LBFGS, and for state that is neither one number nor one number per element.
        """
        return optimizer_state.original_state_dict(optimizer)

    @neutral
    def load_original_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads the state dict of an optimizer that was made with :meth:`original`, or without Shoal.

        Args:
            optimizer: an optimizer of :meth:`contiguous`.
            state_dict: a dictionary with "state" and "param_groups", as in torch.optim.

        Raises:
            ValueError: if it has other groups or shapes, and as :meth:`original_state_dict`. Nothing is loaded then.
        """
        optimizer_state.load_original_state_dict(optimizer, state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ContiguousParams is neither copied nor pickled: copy or save the model, and make a new one for the copy"
        )

    def _point_at_memory(self) -> None:
        for view, parameter in zip(self._views, self._parameters, strict=True):
            parameter.data = view
        if strays := list(self._home.strays()):
            self._home.bring_home(strays)

    def _check_repairable(self) -> None:
        if (place := self._places.replaced()) is not None:
            index, name = place
            raise ValueError(
                f"{self._given.label(index)} was replaced: a module has another parameter as its {name!r} now. {_NEW}"
            )
        for index in range(len(self._parameters)):
            if (problem := self._beyond_repair(index)) is not None:
                raise ValueError(problem)

    def _beyond_repair(self, index: int) -> str | None:
        """Why a parameter can't be moved back; None if it can."""
        parameter, view = self._parameters[index], self._views[index]
        label = self._given.label(index)
        ours = home_of(parameter)
        if ours is not self._home:
            return f"{label} was given to another ContiguousParams since: use that one, and an optimizer made with it"
        for tensor, what in ((parameter, "is"), (self._home.views[index], "has a gradient that is")):
            if (tensor.dtype, tensor.device, tensor.shape) != (view.dtype, view.device, view.shape):
                return (
                    f"{label} {what} now of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}, but its "
                    f"flat memory of {view.dtype} and shape {tuple(view.shape)} on {view.device}: was the model moved "
                    f"or converted? {_NEW} after that"
                )
        memory = (view.data_ptr(), self._gradient_memory[index].data_ptr())
        # moving a storage moves all tensors over it
        if memory != (self._addresses[index], self._gradient_addresses[index]):
            return (
                f"the flat memory of {label} was moved: was the model, or a gradient, shared with another process "
                f"(`share_memory()`, multiprocessing)? {_NEW}, and send copies"
            )
        return None

    def _moved(self) -> tuple[int, str]:
        """The first parameter of which something has left flat memory, and whether that is its "memory" or its
        "gradient".
        """
        for index, (parameter, address) in enumerate(zip(self._parameters, self._addresses, strict=True)):
            if parameter.data_ptr() != address:
                return index, "memory"
        views = zip(self._home.views, self._gradient_addresses, strict=True)
        return next(index for index, (view, address) in enumerate(views) if view.data_ptr() != address), "gradient"


def _check(given: Given, index: int) -> None:
    parameter = given.parameters[index]
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {index} {given.names[index]!r} has no shape yet (a lazy module): run the model on a batch "
            "before you make its ContiguousParams"
        )
    label = given.label(index)
    if parameter.is_inference():
        raise ValueError(f"{label} is {MADE_IN_INFERENCE}")
    if not parameter.is_leaf:
        raise ValueError(f"{label} is not a leaf: optimizers train leaves only")
    if type(parameter.detach()) is not Tensor:
        raise ValueError(f"{label} is a {type(parameter.detach()).__name__}: flat memory holds plain tensors only")
    if parameter.is_meta:
        raise ValueError(f"{label} is on the meta device: give it memory first (`module.to_empty`, `load_state_dict`)")


def _views(buffer: FlatBuffer, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a buffer, with the strides of the tensors in ``like`` if those are dense."""
    flat = buffer.flat
    return [
        # empty_like keeps the strides of dense tensors, and makes others contiguous.
        own_storage(flat[entry.buffer][entry.span.slice]).as_strided(
            entry.shape, torch.empty_like(tensor, device="meta").stride()
        )
        for entry, tensor in zip(buffer.layout.entries, like, strict=True)
    ]


def _small_parts(buffer: FlatBuffer) -> list[Tensor]:
    """The memory of all small tensors of a buffer. Neighbours, with the padding after them, are one part."""
    parts = []
    for number, flat in enumerate(buffer.flat):
        spans = [entry.span for entry in buffer.layout.entries if entry.buffer == number]
        small = [len(span) * flat.itemsize < LARGE for span in spans]
        stops = [span.start for span in spans[1:]] + [flat.numel()]
        for of_small, group in groupby(zip(small, spans, stops, strict=True), itemgetter(0)):
            run = list(group)
            if of_small:
                parts.append(flat[run[0][1].start : run[-1][2]])
    return parts


def _small_samples(buffer: FlatBuffer) -> list[tuple[Tensor, Tensor]]:
    """For each flat tensor of a buffer: its memory as integers, and the indices where small tensors begin in it."""
    samples = []
    for number, flat in enumerate(buffer.flat):
        spans = [entry.span for entry in buffer.layout.entries if entry.buffer == number]
        starts = [span.start for span in spans if 0 < len(span) * flat.itemsize < LARGE]
        if starts and flat.device.type == "cpu" and flat.is_floating_point():
            samples.append((flat.view(_INTEGERS[flat.itemsize]), torch.tensor(starts, device="cpu")))
    return samples


def _flat_parameters(
    indices: Sequence[int], data: FlatBuffer, gradients: FlatBuffer, home: GradientViews
) -> list[FlatParameter]:
    """One flat parameter per buffer of a group."""
    members: list[list[RunParameter]] = [[] for _ in data.flat]
    for index, entry in zip(indices, data.layout.entries, strict=True):
        members[entry.buffer].append(RunParameter(index, home.parameters[index], home.views[index], entry.span))
    return [
        FlatParameter(values, grads, of_buffer, home)
        for values, grads, of_buffer in zip(data.flat, gradients.flat, members, strict=True)
    ]
