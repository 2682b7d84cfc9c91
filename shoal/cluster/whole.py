"""The parameters of a model that ranks hold together, in one piece at rank 0. The only file that knows DTensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.flat import bytes_of


class Whole:
    """A model's parameters at rank 0: those that all ranks hold, and copies of those that are sharded.

    All methods but `digest` and `clear` are collectives: all ranks call them at once.

    Args:
        group: the ranks.
        params: what an optimizer takes: tensors, (name, tensor) pairs or parameter groups of either.

    Attributes:
        params: the same with whole parameters in it, for the optimizer of rank 0. At other ranks, those that are
            sharded have no memory.
        model: the model's parameters, in order.
    """

    def __init__(self, group: dist.ProcessGroup, params: Iterable[Any]) -> None:
        self._group, self._source = group, dist.get_global_rank(group, 0)
        self._is_first = dist.get_rank(group) == 0
        given = list(params)
        self.model: list[Tensor] = []
        self._whole: list[Tensor] = []
        if given and isinstance(given[0], dict):
            self.params = [{**group, "params": self._each(group["params"])} for group in given]
        else:
            self.params = self._each(given)

    def _each(self, params: Any) -> list[Any]:
        return [self._one(item) for item in ([params] if isinstance(params, Tensor) else params)]

    def _one(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return item[0], self._one(item[1])
        if not isinstance(item, Tensor):
            raise ValueError(f"params= has a {type(item).__name__}: give tensors, or parameter groups")
        self.model.append(item)
        self._whole.append(self._in_one_piece(item))
        return self._whole[-1]

    @torch.no_grad()
    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        full = parameter.full_tensor().detach()
        kept = full.clone() if self._is_first else torch.empty_like(full, device="meta")
        return nn.Parameter(kept, requires_grad=parameter.requires_grad)

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is."""
        return any(isinstance(parameter, DTensor) for parameter in self.model)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Give the whole parameters at rank 0 the gradients of those that are sharded."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                gradient = None if parameter.grad is None else _full(parameter.grad)
                whole.grad = gradient if self._is_first else None

    @torch.no_grad()
    def spread(self, more: Iterable[Tensor]) -> None:
        """Set all ranks' parameters, and `more` tensors that all of them hold, to those of rank 0."""
        works = []
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                full = whole.detach() if self._is_first else torch.empty(whole.shape, dtype=whole.dtype)
                sent = distribute_tensor(full.to(parameter.device), mesh, placements)
                parameter.to_local().copy_(sent.to_local())
            else:
                works.append(dist.broadcast(parameter.detach(), self._source, group=self._group, async_op=True))
        for tensor in more:
            works.append(dist.broadcast(tensor.detach(), self._source, group=self._group, async_op=True))
        for work in works:
            work.wait()

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of the sharded parameters of the model, and of their whole ones."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                whole.grad = None
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def digest(self) -> bytes:
        """The hash of the gradients that all ranks are to have alike."""
        hasher = blake3()
        for parameter in self.model:
            if not isinstance(parameter, DTensor) and parameter.grad is not None:
                hasher.update(bytes_of(parameter.grad.detach().to("cpu").contiguous()))
        return hasher.digest()


def _full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
