"""The optimizer's own copy of the parameters, on the host: it steps there, while the device keeps parameters and
gradients only, and the trainer goes on with the old ones until they are set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from shoal.flat import FlatBuffer


class HostCopy:
    """The model's parameters, and a parameter on the host for each.

    Args:
        params: what an optimizer takes: tensors, (name, tensor) pairs or parameter groups of either. They move into
            flat memory.

    Attributes:
        groups: the same parameter groups of host parameters, to make the optimizer of.
        model: the model's parameters, in order.

    Raises ValueError for what is no tensor, and as `FlatBuffer.adopt`.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.model: list[torch.Tensor] = []
        self.groups = [{**group, "params": self._hosts(group["params"])} for group in groups]
        self.pinned = any(tensor.device.type == "cuda" for tensor in self.model)
        self._memory = FlatBuffer.adopt(self.model)

    def _hosts(self, params: Any) -> list[Any]:
        return [self._host(item) for item in ([params] if isinstance(params, torch.Tensor) else params)]

    def _host(self, item: Any) -> Any:
        if isinstance(item, tuple):
            name, tensor = item
            return name, self._host(tensor)
        if not isinstance(item, torch.Tensor):
            raise ValueError(f"params= has a {type(item).__name__}: give tensors, or parameter groups")
        self.model.append(item)
        return nn.Parameter(item.detach().to("cpu", copy=True), requires_grad=item.requires_grad)

    @torch.no_grad()
    def publish(self, host: FlatBuffer) -> None:
        """Set the model's parameters to those on the host."""
        self._copy(host, self._memory)

    @torch.no_grad()
    def fetch(self, host: FlatBuffer) -> None:
        """Set those on the host to the model's parameters."""
        self._copy(self._memory, host)

    def _copy(self, source: FlatBuffer, target: FlatBuffer) -> None:
        one_device = len(source.layout.buffers) == len(target.layout.buffers)
        pairs = zip(*((source.flat, target.flat) if one_device else (source.views(), target.views())), strict=True)
        for theirs, mine in pairs:
            mine.copy_(theirs, non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()

    def param_groups(self, optimizer: torch.optim.Optimizer) -> list[ModelGroup]:
        """The parameter groups of the optimizer that was made of `groups`, with the model's parameters in them."""
        made, first = [], 0
        for group in optimizer.param_groups:
            made.append(ModelGroup(group, self.model[first : first + len(group["params"])]))
            first += len(group["params"])
        return made


class ModelGroup(MutableMapping[str, Any]):
    """A parameter group of the optimizer on the host, as users see it: its options are the same, and may be changed;
    its parameters are the model's."""

    def __init__(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        self._group, self._params = group, params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("the parameters of a run are fixed")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))
