"""Where the trained tensors live: in the optimizer's flat memory, in the modules that compute with them, and, where the
optimizer steps on the host, in a copy there.

Other code may change the first two after the optimizer was made. `parameter.data = …`, `model.to(memory_format=…)` and
the like give a parameter other memory; `module.weight = nn.Parameter(…)` gives a module another parameter. Nothing
reports such changes, so `Optimizer` looks for them once an epoch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from shoal.flat import FlatBuffer, Places, holders_of, living_modules
from shoal.optim._torch import NormBase, writes_of

log = logging.getLogger(__name__)

_address_of = Tensor.data_ptr
_OF_SEVERAL_RANKS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Modules of torch that communicate with other ranks in each backward pass. They are found by name, because importing
them is slow. (Where parameters are DTensors, as with FSDP2, no optimizer can be made.)"""


class Placement:
    """The places of the model's parameters, and of the extra tensors that are shared with them.

    As long as it lives, `load_state_dict(assign=True)` copies the values into these tensors instead of replacing them.

    Args:
        parameters: of the model.
        memory: their flat memory.
        extras: the `extra_tensors` of `Optimizer`; they are not in flat memory.
        names: of the parameters, as the user gave them; empty without names.
        copied: whether the optimizer steps copies of the parameters. Then only the user writes to these in place.

    Attributes:
        unshared: classes of layers that keep running statistics which are not among `extra_tensors`, each with the
            number of its layers.
    """

    def __init__(
        self, parameters: Sequence[Tensor], memory: FlatBuffer, extras: Sequence[Tensor], names: list[str], copied: bool
    ) -> None:
        self._parameters, self._views, self._names, self._copied = list(parameters), memory.views(), names, copied
        self._addresses = list(map(_address_of, self._parameters))
        self._versions = self._count_writes()
        tensors = [*parameters, *extras]
        holders = holders_of(tensors)
        self._held_as = {holder.index: f"{holder.name!r} of a {type(holder.module).__name__}" for holder in holders}
        self._places = Places(tensors, holders)
        self._places.keep()
        shared = set(map(_address_of, extras))
        trained = [holder.module for holder in holders if tensors[holder.index].requires_grad]
        layers = {module for module in trained if isinstance(module, NormBase)}
        means = [(layer, layer.running_mean) for layer in layers if layer.running_mean is not None]
        self.unshared = Counter(type(layer).__name__ for layer, mean in means if mean.data_ptr() not in shared)

    def name_of(self, what: int | Tensor) -> str:
        """The name of a parameter in messages; of one of the parameters and extra tensors, given its number."""
        index = list(map(id, self._parameters)).index(id(what)) if isinstance(what, Tensor) else what
        count = len(self._parameters)
        number = f"parameter {index}" if index < count else f"extra tensor {index - count}"
        name = repr(self._names[index]) if index < len(self._names) else self._held_as.get(index)
        return number if name is None else f"{number} ({name})"

    def check(self) -> None:
        """Look whether the model still computes with these parameters.

        Raises:
            ValueError: with the name of a parameter that a module has replaced, or that has another dtype, device or
                shape than its flat memory.
        """
        check_places(self._places, self.name_of, "optimizer")
        if list(map(_address_of, self._parameters)) == self._addresses:
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if not _is_alike(parameter, view):
                raise ValueError(
                    f"{self.name_of(index)} is {_described(parameter)} now, and was {_described(view)} when the "
                    "optimizer was made: convert or move the model before that"
                )

    def refuse_ranks(self) -> None:
        """Look for wrappers that communicate with other ranks. Each rank would be a peer, and a rank that waits in a
        round for one that waits in the backward pass would wait forever.

        Raises:
            ValueError: if such a wrapper of several ranks holds one of the parameters.
        """
        if not (distributed.is_available() and distributed.is_initialized()) or self._wrapped() is None:
            return
        gc.collect()  # a wrapper that nobody uses any more does no harm
        if (found := self._wrapped()) is not None:
            wrapper, ranks, index = found
            raise ValueError(
                f"{self.name_of(index)} is held by a {wrapper} of {ranks} ranks, and a peer is one process: train the "
                "model without that wrapper; each process is a peer then, and peers average gradients among themselves"
            )

    def _wrapped(self) -> tuple[str, int, int] | None:
        """The class of such a wrapper, the number of its ranks, and the number of a parameter that it holds."""
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for module in living_modules(_OF_SEVERAL_RANKS):
            group: Any = module.__dict__.get("process_group")  # none yet, if another thread is making it
            held = [indices[id(parameter)] for parameter in module.parameters() if id(parameter) in indices]
            if held and group is not None and group.size() > 1:
                return type(module).__name__, group.size(), held[0]
        return None

    @torch.no_grad()
    def take_over(self) -> bool:
        """Copy parameters that were given other memory into the flat memory, and make them views of it again.

        Returns:
            Whether the flat memory may hold other values than before.

        Raises:
            ValueError: as `check`; then nothing has changed.
        """
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
        """Make the parameters views of the flat memory again, which has newer values than they have."""
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
        return [writes_of(parameter) for parameter in self._parameters] if self._copied else []


def check_places(places: Places, name_of: Callable[[int], str], trainer: str) -> None:
    """Look whether modules still compute with the tensors that an optimizer or averager (`trainer`) trains.

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


class HostCopy:
    """The optimizer's own copy of the parameters, on the host. The optimizer steps there, while the device keeps only
    parameters and gradients, and the trainer continues with the old parameters until `publish` sets the new ones.

    Args:
        params: what an optimizer takes: tensors, (name, tensor) pairs or parameter groups of either. They move into
            flat memory.

    Attributes:
        groups: the same parameter groups with the parameters on the host, from which the optimizer is made.
        model: the model's parameters, in order.
        memory: their flat memory.
        aside: the options of the optimizer's groups that users read and write while the groups hold others; else None.
        lock: held while an option is written, and while it is decided where.

    Raises:
        ValueError: for what is not a tensor, and as `FlatBuffer.adopt`.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.model: list[Tensor] = []
        self.groups = [{**group, "params": self._hosts(group["params"])} for group in groups]
        self.pinned = any(tensor.device.type == "cuda" for tensor in self.model)
        self.memory = FlatBuffer.adopt(self.model)
        self.aside: list[dict[str, Any]] | None = None
        self.lock = threading.Lock()

    def _hosts(self, params: Any) -> list[Any]:
        return [self._host(item) for item in ([params] if isinstance(params, Tensor) else params)]

    def _host(self, item: Any) -> Any:
        if isinstance(item, tuple):
            name, tensor = item
            return name, self._host(tensor)
        if not isinstance(item, Tensor):
            raise ValueError(f"params= has a {type(item).__name__}: give tensors, or parameter groups")
        self.model.append(item)
        return nn.Parameter(item.detach().to("cpu", copy=True), requires_grad=item.requires_grad)

    @torch.no_grad()
    def copy(self, source: FlatBuffer, target: FlatBuffer) -> None:
        """Set the model's parameters to those on the host, or the other way round, given the flat memory of both."""
        one_device = len(source.layout.buffers) == len(target.layout.buffers)
        pairs = zip(*((source.flat, target.flat) if one_device else (source.views(), target.views())), strict=True)
        for theirs, mine in pairs:
            mine.copy_(theirs, non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()

    def param_groups(self, optimizer: torch.optim.Optimizer) -> list[ModelGroup]:
        """The parameter groups of the optimizer that was made from `groups`, with the model's parameters in them."""
        made, first = [], 0
        for index, group in enumerate(optimizer.param_groups):
            made.append(ModelGroup(self, index, group, self.model[first : first + len(group["params"])]))
            first += len(group["params"])
        return made

    @contextlib.contextmanager
    def set_aside(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within, what users write into the `param_groups` does not reach those of the optimizer, which may be making
        a step on another thread. Afterwards it does."""
        with self.lock:
            before = [dict(group) for group in optimizer.param_groups]
            self.aside = [dict(group) for group in before]
        try:
            yield
        finally:
            with self.lock:
                for group, old, written in zip(optimizer.param_groups, before, self.aside, strict=True):
                    group.update({k: v for k, v in written.items() if k not in old or v is not old[k]})
                self.aside = None


class ModelGroup(MutableMapping[str, Any]):
    """A parameter group of the optimizer on the host as users see it: with the same options, which may be changed, and
    the model's parameters."""

    def __init__(self, host: HostCopy, index: int, group: dict[str, Any], params: list[Tensor]) -> None:
        self._host, self._index, self._group, self._params = host, index, group, params

    @property
    def _options(self) -> dict[str, Any]:
        aside = self._host.aside
        return self._group if aside is None else aside[self._index]

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._options[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("the parameters of a run are fixed")
        with self._host.lock:
            self._options[key] = value

    def __delitem__(self, key: str) -> None:
        del self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(dict(self))
