"""The parameters of a model that ranks hold together, in one piece at rank 0. With `strands`, the only file that
knows DTensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shoal.flat import bytes_of

T = TypeVar("T")


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
        of: the model's parameter of each in `params`, by its id.
    """

    def __init__(self, group: dist.ProcessGroup, params: Iterable[Any]) -> None:
        self._group, self._source = group, dist.get_global_rank(group, 0)
        self._is_first = dist.get_rank(group) == 0
        given = list(params)
        self._has_stepped = False
        self.model: list[Tensor] = []
        self.of: dict[int, Tensor] = {}
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
        self.of[id(self._whole[-1])] = item
        return self._whole[-1]

    @torch.no_grad()
    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        found = parameter.full_tensor().detach()
        kept = found.clone() if self._is_first else torch.empty_like(found, device="meta")
        return nn.Parameter(kept, requires_grad=parameter.requires_grad)

    @property
    def gathers_alone(self) -> bool:
        """Whether gathering is no collective, since no parameter is sharded."""
        return not any(isinstance(parameter, DTensor) for parameter in self.model)

    def gather_for_step(self) -> None:
        """Gather the gradients; in the first step after the parameters, which may have been loaded since they were
        gathered."""
        if not self._has_stepped:
            self.gather_parameters()
            self._has_stepped = True
        self.gather_gradients()

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Give the whole parameters at rank 0 the gradients of those that are sharded."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                gradient = None if parameter.grad is None else full(parameter.grad)
                whole.grad = gradient if self._is_first else None

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Set the whole parameters at rank 0 to what the model has: others may have loaded it."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                found = parameter.full_tensor()
                if self._is_first:
                    whole.copy_(found)

    @torch.no_grad()
    def spread(self, more: Iterable[Tensor]) -> None:
        """Copy the parameters of rank 0 to all ranks, and `more` tensors, which each rank holds whole."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if isinstance(parameter, DTensor):
                made = cut(self._group, whole.detach() if self._is_first else None, whole.dtype, parameter)
                parameter.to_local().copy_(local(made))
            else:
                self._broadcast(parameter.detach())
        for tensor in more:
            self._broadcast(tensor.detach())

    def _broadcast(self, tensor: Tensor) -> None:
        """Ranks may have it with other strides, and what is sent is memory."""
        sent = tensor.contiguous()
        dist.broadcast(sent, self._source, group=self._group)
        if sent is not tensor:
            tensor.copy_(sent)

    @property
    def gradients(self) -> bytes:
        """Which of the sharded parameters have a gradient, as bits."""
        flags = [parameter.grad is not None for parameter in self.model if isinstance(parameter, DTensor)]
        return sum(flag << number for number, flag in enumerate(flags)).to_bytes(len(flags) // 8 + 1, "little")

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of all parameters of the model, and of the whole ones."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if whole is not parameter:
                whole.grad = None
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def digest(self) -> bytes:
        """See `digest_of`."""
        return digest_of(self.model)


def digest_of(model: Iterable[Tensor]) -> bytes:
    """The hash of the gradients that all ranks are to have alike: those that are not sharded."""
    hasher = blake3()
    for parameter in model:
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            gradient = parameter.grad.detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            hasher.update(bytes_of(gradient.to("cpu").contiguous()))
    return hasher.digest()


def full(tensor: Tensor) -> Tensor:
    """The tensor in one piece; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(group: dist.ProcessGroup | None, whole: object, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor that rank 0 has in one piece, placed as another one of its shape. A collective.

    Args:
        group: the ranks; None for a process that is alone.
        whole: at rank 0 the tensor.
        like: the other one.
    """
    source = whole if isinstance(whole, Tensor) else torch.empty(like.shape, dtype=dtype)
    copy = source.to(like.device).contiguous()
    if group is not None:
        dist.broadcast(copy, dist.get_global_rank(group, 0), group=group)
    if not isinstance(like, DTensor):
        return copy
    mesh, placements = like.device_mesh, like.placements
    # Each rank cuts its own: a mesh may be of a part of the ranks, and has a rank 0 of its own.
    copies = DTensor.from_local(copy, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, placements)


def shared_by_all(group: dist.ProcessGroup | None, value: T) -> T:
    """What rank 0 gives, at all ranks. A collective."""
    # torch pickles it: the ranks of one cluster run one script, and trust each other as in any process group.
    if group is None:
        return value
    found = [value]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    return found[0]
