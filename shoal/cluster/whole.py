"""Keeps the parameters of a sharded model in one piece at rank 0. In this room, only this file, `shards` and
`strands` use DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shoal.cluster.dtensors import is_dtensor
from shoal.cluster.shards import Shards
from shoal.flat import Listed

T = TypeVar("T")


class Whole(Shards):
    """A model's parameters at rank 0: unsharded ones as they are, and whole copies of sharded ones.

    Args:
        group: the ranks.
        params: as for an optimizer: tensors, (name, tensor) pairs or parameter groups of either.

    Attributes:
        params: the same with whole parameters in place of sharded ones, for the optimizer of rank 0. At other ranks the
            whole parameters have no memory.
        the others: see `Shards`.
    """

    are_everywhere = False

    def __init__(self, group: dist.ProcessGroup, params: Iterable[Any]) -> None:
        listed = Listed(params)
        super().__init__(listed.params, group)
        self.are_here = self._is_first = dist.get_rank(group) == 0
        self._has_stepped = False
        self.model = [parameter for _, parameter in listed.named]
        self._whole = [self._in_one_piece(parameter) for parameter in self.model]
        self.of = dict(zip(map(id, self._whole), self.model, strict=True))
        self.params = listed.like_given(self._whole)
        pairs = zip(self.model, self._whole, strict=True)
        self._sharded = [(parameter, whole) for parameter, whole in pairs if is_dtensor(parameter)]
        self._alike, self._apart = [p for p, _ in self._sharded], [whole for _, whole in self._sharded]
        self.gathers_alone = not self._sharded

    @torch.no_grad()
    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        if not is_dtensor(parameter):
            return parameter
        found = parameter.full_tensor().detach()
        kept = found.clone() if self._is_first else torch.empty_like(found, device="meta")
        return nn.Parameter(kept, requires_grad=parameter.requires_grad)

    @torch.no_grad()
    def gather_for_step(self) -> None:
        """See `Shards`. In the first step, gather the parameters before, because the user may have loaded them since
        they were first gathered. Only rank 0 has the gradients."""
        if not self._has_stepped:
            self.gather_parameters()
            self._has_stepped = True
        for parameter, whole in self._sharded:
            gradient = None if parameter.grad is None else full(parameter.grad)
            whole.grad = gradient if self._is_first else None

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Set the whole parameters at rank 0 to the values of the model, which the user may have loaded."""
        for parameter, whole in self._sharded:
            found = parameter.full_tensor()
            if self._is_first:
                whole.copy_(found)

    def _spread(self) -> None:
        """See `Shards`."""
        for parameter, whole in zip(self.model, self._whole, strict=True):
            if is_dtensor(parameter):
                made = cut(self.group, whole.detach() if self._is_first else None, whole.dtype, parameter)
                parameter.to_local().copy_(local(made))
            else:
                self._broadcast(parameter.detach())


class Placed:
    """Values that lie as a model's own parameters do at each rank: whole, or sharded. Its methods are collectives.

    Args:
        group: the ranks; None for a single process.
        model: the parameters.

    Attributes:
        group, model: as given.
        rank: this rank.
        numbers: the indices of the parameters, once.
    """

    def __init__(self, group: dist.ProcessGroup | None, model: Sequence[Tensor]) -> None:
        self.group, self.model, self.rank = group, model, 0 if group is None else dist.get_rank(group)
        self.numbers = [range(len(model))]

    def is_cut(self, name: str, value: object, like: Tensor) -> bool:
        """Whether rank 0 may have only a part of a value of the state of a parameter."""
        return isinstance(value, Tensor)

    def collect(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The values in one piece, by the number of their parameter."""
        return {number: full(value) for number, value in values.items()}

    def deal(self, wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies of tensors that rank 0 has in one piece, with the placements of the parameters. At other ranks only
        their dtypes count; they are on the device "meta"."""
        found = {}
        for number, whole in wholes.items():
            made = cut(self.group, None if whole.is_meta else whole, whole.dtype, self.model[number])
            found[number] = made.clone() if made is whole else made
        return found

    def described_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The parameter groups of the model."""
        return [dict(group) for group in groups]


def full(tensor: Tensor) -> Tensor:
    """The tensor in one piece; a collective if it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of the tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def cut(group: dist.ProcessGroup | None, whole: object, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Distribute a tensor that rank 0 has in one piece, with the placement of another one. A collective.

    Args:
        group: the ranks; None for a single process.
        whole: at rank 0 the tensor; at other ranks anything.
        dtype: the dtype of the tensor.
        like: a tensor of the same shape, whose device and placement the result has.
    """
    source = whole if isinstance(whole, Tensor) else torch.empty(like.shape, dtype=dtype)
    copy = source.to(like.device).contiguous()
    if group is not None:
        dist.broadcast(copy, dist.get_global_rank(group, 0), group=group)
    if not is_dtensor(like):
        return copy
    from torch.distributed.tensor import DTensor, Replicate  # see `is_dtensor`

    mesh, placements = like.device_mesh, like.placements
    # Each rank cuts its shard out of the whole. `distribute_tensor` would take the whole from the mesh's own rank 0,
    # which may be another rank.
    copies = DTensor.from_local(copy, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, placements)


def shared_by_all(group: dist.ProcessGroup | None, value: T) -> T:
    """Return the value of rank 0 at all ranks. A collective."""
    # torch pickles the value. The ranks of a cluster run one script, and trust each other as in any process group.
    if group is None:
        return value
    found = [value]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    return found[0]
