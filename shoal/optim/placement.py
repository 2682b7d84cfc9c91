"""Where the parameters of the trained model are, and how this changes when modules or users replace or move them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed

from shoal.flat import FlatBuffer, Places, Shown, holders_of, living_modules_of
from shoal.optim._torch import NormBase

_OF_SEVERAL_RANKS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Modules of torch that communicate with other ranks in each backward pass. They are found by name, because importing
them is slow. (DTensors, as with FSDP2, are refused when the optimizer is made, unless it is a cluster's.)"""


class Placement:
    """The places of the model's parameters and of the extra tensors.

    Other code may change these places after the optimizer was made. `parameter.data = …`, `model.to(memory_format=…)`
    and the like give a parameter other memory. `module.weight = nn.Parameter(…)` gives a module another parameter.
    Nothing reports such changes, so `Optimizer` looks for them once an epoch.

    As long as this object exists, `load_state_dict(assign=True)` copies values into these tensors, and does not replace
    the tensors.

    Args:
        parameters: the model's parameters.
        memory: the flat memory of the parameters.
        extras: the `extra_tensors` of `Optimizer`, which are not in flat memory.
        names: the names that the user gave to the parameters; empty without names.

    Attributes:
        unshared: the classes of layers whose running statistics are not in `extra_tensors`, with the number of such
            layers.
        modules: the modules that hold these tensors, as long as others keep them.
        shown: what users see of the optimizer, once it is made.
    """

    shown: Shown | None = None

    def __init__(
        self, parameters: Sequence[Tensor], memory: FlatBuffer, extras: Sequence[Tensor], names: list[str]
    ) -> None:
        self._parameters, self._views, self._names = list(parameters), memory.views(), names
        self._at = [parameter.detach() for parameter in self._parameters]  # where they were last
        tensors = [*parameters, *extras]
        holders = holders_of(tensors)
        self._held_as = {holder.index: f"{holder.name!r} of a {type(holder.module).__name__}" for holder in holders}
        self._places = Places(tensors, holders)
        self._places.keep()
        self.modules = WeakSet(holder.module for holder in holders)
        shared = set(map(Tensor.data_ptr, extras))
        trained = [holder.module for holder in holders if tensors[holder.index].requires_grad]
        layers = {module for module in trained if isinstance(module, NormBase)}
        means = [(layer, layer.running_mean) for layer in layers if layer.running_mean is not None]
        self.unshared = Counter(type(layer).__name__ for layer, mean in means if mean.data_ptr() not in shared)

    def name_of(self, what: int | Tensor) -> str:
        """The name of a parameter or extra tensor in messages, given the parameter, or the number of either."""
        index = list(map(id, self._parameters)).index(id(what)) if isinstance(what, Tensor) else what
        count = len(self._parameters)
        number = f"parameter {index}" if index < count else f"extra tensor {index - count}"
        name = repr(self._names[index]) if index < len(self._names) else self._held_as.get(index)
        return number if name is None else f"{number} ({name})"

    def check(self) -> None:
        """Check that the model still computes with these parameters.

        Raises:
            ValueError: with the name of a parameter that a module has replaced, or that has another dtype, device or
                shape than its flat memory; or as `check_groups`.
        """
        self.check_groups()
        check_places(self._places, self.name_of, "optimizer")
        if self._are_in_place:
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if not _is_alike(parameter, view):
                raise ValueError(
                    f"{self.name_of(index)} is {_described(parameter)} now, and was {_described(view)} when the "
                    "optimizer was made: convert or move the model before that"
                )

    def check_groups(self) -> None:
        """Check that the optimizer still has these parameters. Raises ValueError as `Shown.check`."""
        if self.shown is not None:
            self.shown.check()

    def refuse_ranks(self, cluster: int = 1) -> None:
        """Refuse a model in a wrapper that communicates with other ranks. Each rank would be a peer. Then one rank
        could wait in a round while another waits in the backward pass, and both would wait forever.

        Args:
            cluster: the number of ranks of this peer. A cluster may have a DistributedDataParallel of all its ranks.

        Raises:
            ValueError: if another wrapper of several ranks holds one of the parameters.
        """
        if not (distributed.is_available() and distributed.is_initialized()) or self._wrapped() is None:
            return
        gc.collect()  # a wrapper that nobody uses any more does no harm
        if (found := self._wrapped()) is not None:
            wrapper, ranks, index = found
            if cluster == ranks and wrapper == "DistributedDataParallel":
                return
            if cluster > 1:
                raise ValueError(
                    f"{self.name_of(index)} is held by a {wrapper} of {ranks} ranks, and a cluster of {cluster} needs "
                    f"DistributedDataParallel or fully_shard over all of its ranks"
                )
            raise ValueError(
                f"{self.name_of(index)} is held by a {wrapper} of {ranks} ranks, and a peer is one process: give "
                "cluster=shoal.Cluster() in all ranks, which are one peer then; or train the model without that "
                "wrapper: each process is a peer then, and peers average gradients among themselves"
            )

    def _wrapped(self) -> tuple[str, int, int] | None:
        """The class of a wrapper of several ranks, the number of its ranks, and the number of a parameter that it
        holds; None if there is no such wrapper."""
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for module in living_modules_of(_OF_SEVERAL_RANKS):
            group: Any = module.__dict__.get("process_group")  # None if another thread is just making the module
            held = [indices[id(parameter)] for parameter in module.parameters() if id(parameter) in indices]
            if held and group is not None and group.size() > 1:
                return type(module).__name__, group.size(), held[0]
        return None

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the parameters that other code has moved to other memory into the flat memory, and make them views of it
        again.

        Raises:
            ValueError: as `check`. Then nothing has changed.
        """
        self.check()
        if self._are_in_place:
            return
        for parameter, view, at in zip(self._parameters, self._views, self._at, strict=True):
            if not parameter.is_set_to(at):
                view.copy_(parameter.clone())  # it may lie in the same memory, with other strides
                parameter.data = view
        self._at = [parameter.detach() for parameter in self._parameters]

    @torch.no_grad()
    def restore(self) -> bool:
        """Make the parameters views of the flat memory again. Its values are newer than theirs, and stay. Returns
        whether one of the parameters had other values."""
        had_others = False
        if self._are_in_place:
            return had_others
        for parameter, view, at in zip(self._parameters, self._views, self._at, strict=True):
            if not parameter.is_set_to(at) and _is_alike(parameter, view):
                had_others |= not torch.equal(parameter, view)
                parameter.data = view
        self._at = [parameter.detach() for parameter in self._parameters]
        return had_others

    @property
    def _are_in_place(self) -> bool:
        """Whether all parameters have the memory, the shape and the strides that they had last."""
        return all(map(Tensor.is_set_to, self._parameters, self._at))


def check_places(places: Places, name_of: Callable[[int], str], trainer: str) -> None:
    """Check that modules still compute with the tensors that an optimizer or averager trains.

    Args:
        places: the places of the tensors.
        name_of: returns the name of a tensor, given its number.
        trainer: "optimizer" or "averager", for the message.

    Raises:
        ValueError: with the name of a tensor that a module has replaced.
    """
    if (place := places.replaced()) is not None:
        index, name = place
        raise ValueError(
            f"{name_of(index)} was replaced: a module has another tensor as its {name!r} now, which the {trainer} does "
            f"not train; change the model before you make it, or write into the tensor that is there (copy_)"
        )


def _is_alike(parameter: Tensor, view: Tensor) -> bool:
    return (parameter.dtype, parameter.device, parameter.shape) == (view.dtype, view.device, view.shape)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
