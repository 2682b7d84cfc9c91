"""The copy of the parameters on the host that an optimizer steps, and the parameter groups as its users see them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.flat import FlatBuffer


class HostCopy:
    """The optimizer's own copy of the parameters, on the host. The optimizer steps there, while the device keeps only
    parameters and gradients, and the trainer continues with the old parameters until `publish` sets the new ones.

    Args:
        params: what an optimizer takes: tensors, (name, tensor) pairs or parameter groups of either. They move into
            flat memory.
        precise: keep in float32 what the model has in fewer bits.
        memory: the flat memory in which the parameters are already; None: they move into it now.

    Attributes:
        groups: the same parameter groups with the parameters on the host, from which the optimizer is made.
        model: the model's parameters, in order.
        memory: their flat memory.
        aside: the options of the optimizer's groups that users read and write while the groups hold others; else None.
        lock: held while an option is written, and while it is decided where.

    Raises:
        ValueError: for what is not a tensor, and as `FlatBuffer.adopt`.
    """

    def __init__(self, params: Iterable[Any], *, precise: bool = False, memory: FlatBuffer | None = None) -> None:
        given, self._precise = list(params), precise
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.model: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.groups = [{**group, "params": self._hosts(group["params"])} for group in groups]
        self.pinned = any(tensor.device.type == "cuda" for tensor in self.model)
        self.memory = FlatBuffer.adopt(self.model) if memory is None else memory
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
        fewer = self._precise and item.is_floating_point() and item.element_size() < 4
        dtype = torch.float32 if fewer else item.dtype
        copy = nn.Parameter(item.detach().to("cpu", dtype, copy=True), requires_grad=item.requires_grad)
        self._copies.append(copy)
        return copy

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Look whether that optimizer has the parameters of `groups` as they are there, see `check_order`."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        check_order(optimizer, own, self._copies)

    @torch.no_grad()
    def copy(self, source: FlatBuffer, target: FlatBuffer) -> None:
        """Set the model's parameters to those on the host, or the other way round, given the flat memory of both."""
        dtypes = [[buffer.dtype for buffer in memory.layout.buffers] for memory in (source, target)]
        alike = dtypes[0] == dtypes[1]  # else the buffers of several devices, or of another precision
        pairs = zip(*((source.flat, target.flat) if alike else (source.views(), target.views())), strict=True)
        for theirs, mine in pairs:
            mine.copy_(theirs, non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()

    def param_groups(self, optimizer: torch.optim.Optimizer) -> list[ModelGroup]:
        """The parameter groups of the optimizer that was made from `groups`, with the model's parameters in them."""
        made, first = [], 0
        for index, group in enumerate(optimizer.param_groups):
            made.append(ModelGroup(group, self.model[first : first + len(group["params"])], self, index))
            first += len(group["params"])
        return made

    @contextlib.contextmanager
    def set_aside(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Keep what users write into the `param_groups` from the optimizer, which may be stepping in another thread.
        When the context ends, the optimizer gets these changes."""
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


def check_order(optimizer: torch.optim.Optimizer, own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Look whether an optimizer that a function has made has the parameters that the function was given.

    Raises:
        ValueError: if it has left some out, or has them in another order.
    """
    if list(map(id, own)) != list(map(id, given)):
        raise ValueError(
            f"the function made a {type(optimizer).__name__} that does not have all parameters, or has them in "
            "another order than they were given: divide them into groups before, in params="
        )


class ModelGroup(MutableMapping[str, Any]):
    """A parameter group of an optimizer of copies, as users see it: with the same options, which may be changed,
    and the model's parameters.

    Args:
        group: of the optimizer.
        params: of the model.
        host: has the copies, if the optimizer may be stepping in another thread.
        index: of the group.
    """

    def __init__(
        self, group: dict[str, Any], params: list[Tensor], host: HostCopy | None = None, index: int = 0
    ) -> None:
        self._host, self._index, self._group, self._params = host, index, group, params

    @property
    def _options(self) -> dict[str, Any]:
        aside = None if self._host is None else self._host.aside
        return self._group if aside is None else aside[self._index]

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._options[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("the parameters of a run are fixed")
        with contextlib.nullcontext() if self._host is None else self._host.lock:
            self._options[key] = value

    def __delitem__(self, key: str) -> None:
        del self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(dict(self))
