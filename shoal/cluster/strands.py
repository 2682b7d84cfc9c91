"""Divides the parameters of a model into strands, which the ranks of a cluster carry.

With `Whole`, rank 0 steps the whole model. Here each rank steps its own strands: pieces of all parameters, in separate
memory. Values move between the model, as FSDP2 or DDP have placed it, and the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shoal.cluster.cluster import Cluster
from shoal.cluster.dtensors import is_dtensor
from shoal.cluster.exchange import ParameterExchange, Stretch
from shoal.cluster.shards import Shards
from shoal.cluster.spans import Route, route_of, shard_of, strand_of
from shoal.cluster.whole import local
from shoal.flat import Listed, Places, holders_of, is_per_tensor, living_modules

T = TypeVar("T")


class Strands(Shards):
    """A model's parameters as pieces, which an optimizer steps: one for each parameter and each strand of this rank.

    With L strands, strand k of a parameter with n elements is its elements k*n//L to (k+1)*n//L in row-major order,
    however many ranks there are. All ranks carry the same number of strands. They carry them in the order of the shards
    that they hold, so a rank carries nearly the same elements that it holds; only some at the borders differ.

    Values are moved bit for bit. Modules keep the model's parameters when the user loads others with `assign=True`.

    Args:
        cluster: the ranks. Their number divides the number of strands.
        params: as for an optimizer: tensors, (name, tensor) pairs or parameter groups of either.

    Attributes:
        rank: that of the cluster.
        mine: the strands that this rank carries.
        carriers: the rank that carries each strand.
        params: the same with pieces in place of parameters: in each group the pieces of the first strand, then those of
            the second, and so on. The names of pieces end in the strand, as in "0.weight[3/8]".
        groups: `params` as parameter groups.
        pieces: the pieces in `params`, in order.
        numbers: for each strand of `mine`, the indices of its pieces in `pieces`.
        is_ahead: whether the pieces were changed since `spread`. Code that changes them sets this.
        always_sends_frozen: see `shoal.optim.division.Division`.
        the others: see `Shards`.

    Raises:
        ValueError: if `params` contains something other than parameters, or a parameter that is neither sharded on dim
            0 over exactly these ranks nor held whole by all of them. Then nothing was changed.
    """

    always_sends_frozen = are_pieces = True

    def __init__(self, cluster: Cluster, params: Iterable[Any]) -> None:
        listed = Listed(params)
        super().__init__(listed.params, cluster.group)
        self.rank, self._size = cluster.rank, cluster.size
        names = [name for name, _ in listed.named]
        self.model = self._alike = [parameter for _, parameter in listed.named]

        ranks = _global_ranks(self.group)
        places = [_places(self.model[n], ranks, names[n], n) for n in range(len(self.model))]
        order = _ordered(places, self._size)
        share = cluster.strands // self._size
        self.carriers = [rank for rank in order for _ in range(share)]
        carried = [range(order.index(rank) * share, (order.index(rank) + 1) * share) for rank in range(self._size)]
        self.mine = carried[self.rank]
        self._held = [_held(p, place, self._size) for p, place in zip(self.model, places, strict=True)]
        self._owned = [tuple(strand_of(p.numel(), each, cluster.strands) for each in carried) for p in self.model]
        self._spans = [[strand_of(p.numel(), range(k, k + 1), cluster.strands) for k in self.mine] for p in self.model]
        # Cached, since making a route walks over all pairs of ranks, and parameters of one shape share one.
        self._route: Callable[[tuple[range, ...], tuple[range, ...]], Route]
        self._route = functools.cache(functools.partial(route_of, self.rank, order))

        self.pieces: list[nn.Parameter] = []
        self._apart = self.pieces
        self.numbers: list[list[int]] = [[] for _ in self.mine]
        self._pieces_of: list[list[int]] = [[] for _ in self.model]  # for each parameter: the indices of its pieces
        self.groups: list[dict[str, Any]] = []
        first = 0
        for group in listed.groups:
            numbers = range(first, first := first + len(group["params"]))
            self.groups.append({**group, "params": self._each(numbers, names, cluster.strands)})
        self.params = self.groups if listed.has_groups else self.groups[0]["params"]
        self.gathers_alone = not any(self._route(*each).exchanged for each in zip(self._held, self._owned, strict=True))
        self._places = Places(self.model)
        self._places.keep()
        self.gather_parameters()

    def _each(self, numbers: range, names: Sequence[str], strands: int) -> list[Any]:
        """Make the pieces of one group, which has the parameters with these numbers."""
        made: list[Any] = []
        for index, strand in enumerate(self.mine):
            for number in numbers:
                name, parameter = names[number], self.model[number]
                memory = torch.empty(len(self._spans[number][index]), dtype=parameter.dtype, device=parameter.device)
                piece = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                self.numbers[index].append(len(self.pieces))
                self._pieces_of[number].append(len(self.pieces))
                self.pieces.append(piece)
                self.of[id(piece)] = parameter
                made.append((f"{name}[{strand}/{strands}]", piece) if name else piece)
        return made

    # -- between the model and the pieces

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Set the pieces to the values of the model."""
        with ParameterExchange(self.group, self._size) as exchange:
            for number, parameter in enumerate(self.model):
                route = self._route(self._held[number], self._owned[number])
                has, wants = self._stretch(number, parameter), self._stretches(number, self.pieces)
                exchange.add(route, has, wants, parameter.device)

    @torch.no_grad()
    def gather_for_step(self) -> None:
        """See `Shards`. All ranks have gradients for the same parameters."""
        with ParameterExchange(self.group, self._size) as exchange:
            for number, parameter in enumerate(self.model):
                pieces = [self.pieces[place] for place in self._pieces_of[number]]
                if parameter.grad is None:
                    for piece in pieces:
                        piece.grad = None
                    continue
                gradient = _dense(parameter.grad)
                if is_dtensor(parameter) and is_dtensor(gradient):
                    gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
                spans = self._spans[number]
                route = self._route(self._held[number], self._owned[number])
                has = self._stretch(number, gradient)
                if not route.exchanged:  # the pieces are adjacent in this rank's memory, so nothing is copied
                    owned = has[0].view(self._owned[number][self.rank])
                    for piece, values in zip(pieces, torch.split(owned, [len(span) for span in spans]), strict=True):
                        piece.grad = values
                    continue
                for piece in pieces:
                    if piece.grad is None or piece.grad.dtype != gradient.dtype:
                        piece.grad = torch.empty_like(piece, dtype=gradient.dtype)
                wants = [Stretch(s.start, p.grad) for s, p in zip(spans, pieces, strict=True) if p.grad is not None]
                exchange.add(route, has, wants, parameter.device)

    def _spread(self) -> None:
        """See `Shards`."""
        with ParameterExchange(self.group, self._size) as exchange:
            for number, parameter in enumerate(self.model):
                route = self._route(self._owned[number], self._held[number])
                model = self._stretch(number, parameter)
                exchange.add(route, self._stretches(number, self.pieces), model, parameter.device, local(parameter))

    # -- between rank 0 and the pieces

    def is_cut(self, name: str, value: object, like: Tensor) -> bool:
        """Whether a value in the state of the piece `like` has an element for each of its elements, so that rank 0 has
        only a part of it."""
        return isinstance(value, Tensor) and value.shape == like.shape and not is_per_tensor(name, value)

    @torch.no_grad()
    def collect(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Gather values of pieces, such as their momentum, as whole tensors at rank 0.

        Args:
            values: by the index of the piece, a tensor of the same shape. All ranks have values for all pieces of the
                same parameters, and of the same dtype.

        Returns:
            At rank 0, by the number of the parameter, a CPU tensor of its shape; {} at other ranks.
        """
        wholes = {}
        with ParameterExchange(self.group, self._size) as exchange:
            for number, parameter in enumerate(self.model):
                if self._pieces_of[number][0] not in values:
                    continue
                has, wants = self._stretches(number, values), []
                if self.rank == 0:
                    wholes[number] = torch.empty(parameter.shape, dtype=has[0].values.dtype, device="cpu")
                    wants = [Stretch(0, wholes[number].view(-1))]
                route = self._route(self._owned[number], self._at_first(parameter))
                exchange.add(route, has, wants, parameter.device)
        return wholes

    @torch.no_grad()
    def deal(self, wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The reverse of `collect`.

        Args:
            wholes: at rank 0, by the number of the parameter, a tensor of its shape. At other ranks only the dtypes of
                the tensors count; they may be on the device "meta".

        Returns:
            By the index of the piece, a tensor of the same shape and on the same device.
        """
        found: dict[int, Tensor] = {}
        with ParameterExchange(self.group, self._size) as exchange:
            for number, whole in sorted(wholes.items()):
                for place in self._pieces_of[number]:
                    found[place] = torch.empty_like(self.pieces[place], dtype=whole.dtype, requires_grad=False)
                has = [Stretch(0, whole.detach().reshape(-1))] if self.rank == 0 else []
                route = self._route(self._at_first(self.model[number]), self._owned[number])
                exchange.add(route, has, self._stretches(number, found), self.model[number].device)
        return found

    def _at_first(self, parameter: Tensor) -> tuple[range, ...]:
        return (range(parameter.numel()), *[range(0)] * (self._size - 1))

    def _stretch(self, number: int, tensor: Tensor) -> list[Stretch]:
        """This rank's values of that parameter, or of its gradient, in `tensor`: its memory if it is contiguous, else a
        copy."""
        return [Stretch(self._held[number][self.rank].start, local(tensor).contiguous().view(-1))]

    def _stretches(self, number: int, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> list[Stretch]:
        """The stretches of that parameter that this rank carries, in `tensors`, which has one tensor for each piece, by
        its index."""
        places = zip(self._spans[number], self._pieces_of[number], strict=True)
        return [Stretch(span.start, tensors[place].detach().reshape(-1)) for span, place in places]

    # -- the parts of the state, see `shoal.optim.division.Division`

    def divided(self, values: Sequence[T]) -> list[list[T]]:
        """Divide one value for each of `pieces` among the strands of this rank."""
        return [[values[place] for place in places] for places in self.numbers]

    def hashed(self, values: Sequence[Tensor], flat: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors whose hash is the digest of each strand: the pieces, so that any ranks get the same."""
        return self.divided(values)

    def described(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Tensors without memory, with the shape of each parameter of the model and the dtype of its pieces."""
        return [
            torch.empty(model.shape, dtype=mine.dtype, device="meta", requires_grad=mine.requires_grad)
            for model, mine in zip(self.model, self.divided(values)[0], strict=True)
        ]

    def described_names(self, names: Sequence[str]) -> list[str]:
        """The names of the model's parameters, made from the names of their pieces."""
        return [name.rpartition("[")[0] for name in self.divided(names)[0]] if names else []

    def described_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with the pieces of the first strand only, under the names of the model's parameters."""
        found = []
        for group in groups:
            count = len(group["params"]) // len(self.mine)
            names = [name.rpartition("[")[0] for name in group.get("param_names", ())[:count]]
            found.append({**group, "params": group["params"][:count]} | ({"param_names": names} if names else {}))
        return found


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


# -- the placement of the model


def _global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank()] if dist.is_available() and dist.is_initialized() else [0]


Place = tuple[int, int]  # the number of the shard that a rank holds, and the number of its copy of it


def _places(parameter: Tensor, ranks: Sequence[int], name: str, number: int) -> list[Place] | None:
    """The place of each rank; None if each rank holds the whole parameter.

    Raises:
        ValueError: if the parameter is placed in another way.
    """
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard  # see `is_dtensor`

    mesh = parameter.device_mesh.mesh
    shards = [(dim, placed) for dim, placed in enumerate(parameter.placements) if not isinstance(placed, Replicate)]
    is_usual = len(shards) <= 1 and all(type(placed) is Shard and placed.dim == 0 for _, placed in shards)
    # If the ranks of a mesh dimension are not in ascending order, torch itself gives wrong results.
    is_usual = is_usual and all(bool((mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim))
    if not is_usual or sorted(mesh.flatten().tolist()) != sorted(ranks):
        called = name or _name_in_module(parameter) or f"parameter {number}"
        raise ValueError(
            f"{called} of shape {tuple(parameter.shape)} has the placements {parameter.placements} on the ranks "
            f"{mesh.tolist()}: strands need Shard(0) on one dimension of a mesh of exactly the cluster's ranks, in "
            f"their order, {sorted(ranks)}: give Cluster(strands=1)"
        )
    if not shards:
        return None
    rows = mesh.movedim(shards[0][0], 0).reshape(mesh.shape[shards[0][0]], -1).tolist()
    found = {rank: (shard, copy) for shard, row in enumerate(rows) for copy, rank in enumerate(row)}
    return [found[rank] for rank in ranks]


def _name_in_module(parameter: Tensor) -> str:
    """The longest name that a module has for the parameter; "" if there is none."""
    roots = living_modules()
    return max(
        (
            f"{path}.{holder.name}" if path else holder.name
            for holder in holders_of([parameter])
            for root in roots
            for path, module in root.named_modules()
            if module is holder.module
        ),
        key=len,
        default="",
    )


def _ordered(places: Iterable[list[Place] | None], size: int) -> list[int]:
    """The ranks in the order in which they carry the strands: the order of their shards of the first sharded
    parameter."""
    first = next((each for each in places if each is not None), None)
    return list(range(size)) if first is None else sorted(range(size), key=first.__getitem__)


def _held(parameter: Tensor, places: Sequence[Place] | None, size: int) -> tuple[range, ...]:
    """The span of the parameter that each rank holds."""
    if places is None:
        return (range(parameter.numel()),) * size
    rows, shards = parameter.shape[0], 1 + max(shard for shard, _ in places)
    return tuple(shard_of(rows, parameter.numel() // max(1, rows), shard, shards) for shard, _ in places)
