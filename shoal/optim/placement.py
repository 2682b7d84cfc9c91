"""Where the tensors that are trained live: in the optimizer's flat memory, and in the modules that compute with them.

Other code may change both after the optimizer was made. `parameter.data = …`, `model.to(memory_format=…)` and the like
give a parameter other memory; `module.weight = nn.Parameter(…)` gives a module another parameter. Nothing tells of it,
so `Optimizer` looks once an epoch.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.modules.batchnorm import _NormBase

from shoal.flat import FlatBuffer, Places, holders_of, living_modules

log = logging.getLogger(__name__)

_address_of = Tensor.data_ptr
_OF_SEVERAL_RANKS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Modules of torch that talk to other ranks in each backward pass; looked for by name, since importing them is slow.
(Where parameters are DTensors, as those of FSDP2, no optimizer can be made.)"""


class Placement:
    """The places of some parameters, and of the extra tensors that are trained beside them.

    As long as it lives, `load_state_dict(assign=True)` copies the values into these tensors instead of replacing them.

    Args:
        parameters: the model's.
        memory: their flat memory.
        extra_tensors: of `Optimizer`; they are not in flat memory.
        names: of the parameters, as the user gave them; empty if he gave none.
        copied: whether the optimizer steps copies of the parameters. Then nobody but the user writes to these in place.

    Attributes:
        unshared: classes of layers that keep running statistics which are not among `extra_tensors`, with how many
            layers of each there are.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        memory: FlatBuffer,
        extra_tensors: Sequence[Tensor],
        names: Sequence[str],
        *,
        copied: bool,
    ) -> None:
        self._parameters, self._views, self._names, self._copied = list(parameters), memory.views(), names, copied
        self._addresses = list(map(_address_of, self._parameters))
        self._versions = self._count_writes()
        tensors = [*parameters, *extra_tensors]
        holders = holders_of(tensors)
        self._held_as = {holder.index: f"{holder.name!r} of a {type(holder.module).__name__}" for holder in holders}
        self._places = Places(tensors, holders)
        self._places.keep()
        shared = set(map(_address_of, extra_tensors))
        layers = {
            holder.module
            for holder in holders
            if tensors[holder.index].requires_grad and isinstance(holder.module, _NormBase)
        }
        self.unshared = Counter(
            type(layer).__name__
            for layer in layers
            if layer.running_mean is not None and layer.running_mean.data_ptr() not in shared
        )

    def name_of(self, what: int | Tensor) -> str:
        """How a message calls a parameter, given itself, or one of the parameters and extra tensors by its number."""
        index = list(map(id, self._parameters)).index(id(what)) if isinstance(what, Tensor) else what
        count = len(self._parameters)
        number = f"parameter {index}" if index < count else f"extra tensor {index - count}"
        name = repr(self._names[index]) if index < len(self._names) else self._held_as.get(index)
        return number if name is None else f"{number} ({name})"

    def check(self) -> None:
        """Raises ValueError, with the name of the parameter, if a module computes with another one now, or if it has
        another dtype, device or shape than its flat memory."""
        if (place := self._places.replaced()) is not None:
            index, name = place
            raise ValueError(
                f"{self.name_of(index)} was replaced: a module has another tensor as its {name!r} now, which this "
                "optimizer does not train; change the model before you make the optimizer, or write into the tensor "
                "that is there (copy_)"
            )
        if list(map(_address_of, self._parameters)) == self._addresses:
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if not _is_alike(parameter, view):
                raise ValueError(
                    f"{self.name_of(index)} is {_described(parameter)} now, and was {_described(view)} when the "
                    "optimizer was made: convert or move the model before that"
                )

    def refuse_ranks(self) -> None:
        """Raises ValueError if a module of several ranks holds one of the parameters: each rank would be a peer, and
        one that waits in a round for another that waits in the backward pass would wait in vain."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        if self._wrapped() is None:
            return
        gc.collect()  # one that nobody uses any more does no harm
        if (found := self._wrapped()) is not None:
            wrapper, ranks, index = found
            raise ValueError(
                f"{self.name_of(index)} is held by a {wrapper} of {ranks} ranks, and a peer is one process: train the "
                "model without that wrapper; each process is a peer then, and peers average gradients among themselves"
            )

    def _wrapped(self) -> tuple[str, int, int] | None:
        """The class of such a module, how many ranks it has, and the number of a parameter that it holds."""
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for module in living_modules(_OF_SEVERAL_RANKS):
            group: Any = module.__dict__.get("process_group")  # none yet, if another thread is making it
            if group is None or group.size() == 1:
                continue
            for parameter in module.parameters():
                if id(parameter) in indices:
                    return type(module).__name__, group.size(), indices[id(parameter)]
        return None

    @torch.no_grad()
    def take_over(self) -> bool:
        """Copy parameters that have got other memory into the flat memory, and make them views of it again; whether the
        flat memory may hold other values than before. Raises as `check`; then nothing has changed."""
        self.check()
        addresses = list(map(_address_of, self._parameters))
        versions = self._count_writes()
        if (addresses, versions) == (self._addresses, self._versions):
            return False
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view
        self._addresses, self._versions = list(map(_address_of, self._parameters)), versions
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Make the parameters views of the flat memory again, whose values are newer than theirs."""
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.data_ptr() != view.data_ptr() and _is_alike(parameter, view):
                if not torch.equal(parameter, view):
                    log.warning(
                        "what was set as %s while a step was under way in the background is overwritten by that step; "
                        "call optimizer.state_dict() before you change the model, which waits for the step",
                        self.name_of(index),
                    )
                parameter.data = view

    def _count_writes(self) -> list[int]:
        return [parameter._version for parameter in self._parameters] if self._copied else []


def _is_alike(parameter: Tensor, view: Tensor) -> bool:
    return (parameter.dtype, parameter.device, parameter.shape) == (view.dtype, view.device, view.shape)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
