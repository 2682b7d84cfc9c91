"""The parameters of a model that ranks hold together, cut into strands, each at the rank that carries it.

With `Whole`, rank 0 steps the whole model. Here each rank steps its strands: pieces of all parameters, with memory of
their own. Values move between the model, as FSDP2 or DDP have placed it, and the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.cluster.exchange import Exchange, Part
from shoal.cluster.spans import Route, route_of, shard_of, strand_of
from shoal.flat import bytes_of, holders_of, living_modules


class Ranks(Protocol):
    """What is used of a `Cluster`. Without a group it is a single process."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def strands(self) -> int: ...


class Strands:
    """A model's parameters as pieces, which an optimizer steps: one for each parameter and each strand of this rank.

    With L strands, strand k of a parameter of n elements is its elements k*n//L to (k+1)*n//L in row-major order,
    however many ranks there are. The ranks carry equally many. They are ordered by the shard that they hold, so what
    a rank carries is, up to some elements at the borders, what it holds.

    All methods but `digest` and `clear` are collectives: all ranks call them at once. Values arrive bit for bit.

    Args:
        cluster: the ranks. Their number divides the number of strands.
        params: what an optimizer takes: tensors, (name, tensor) pairs or parameter groups of either.

    Attributes:
        rank: of this process.
        mine: the strands that this rank carries.
        carriers: the rank of each strand.
        params: the same with pieces in it: in each group those of the first strand, then those of the second, and so
            on. The names of pieces end in the strand, as in "0.weight[3/8]".
        pieces: those in `params`, in order.
        model: the model's parameters, in order.
        numbers: for each strand of `mine`, the places of its pieces in `pieces`.
        of: the model's parameter of each piece, by its id.

    Raises:
        ValueError: for what is no parameter, and for a parameter that is not sharded on dim 0 over exactly these ranks,
            nor held whole by all of them. Nothing has been changed then.
    """

    def __init__(self, cluster: Ranks, params: Iterable[Any]) -> None:
        self._group, self.rank, self._size = cluster.group, cluster.rank, cluster.size
        self._has_stepped = False
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        named = [[_named(item) for item in _listed(group["params"])] for group in groups]
        self.model: list[Tensor] = [parameter for items in named for _, parameter in items]
        names = [name for items in named for name, _ in items]

        ranks = _global_ranks(self._group)
        places = [_places(self.model[n], ranks, names[n], n) for n in range(len(self.model))]
        order = _ordered(places, self._size)
        share = cluster.strands // self._size
        self.carriers = [rank for rank in order for _ in range(share)]
        carried = [range(order.index(rank) * share, (order.index(rank) + 1) * share) for rank in range(self._size)]
        self.mine = carried[self.rank]
        self._held = [_held(p, place, self._size) for p, place in zip(self.model, places, strict=True)]
        self._owned = [tuple(strand_of(p.numel(), each, cluster.strands) for each in carried) for p in self.model]
        self._spans = [[strand_of(p.numel(), range(k, k + 1), cluster.strands) for k in self.mine] for p in self.model]
        # At most as many routes as there are shapes are made: each is a walk over all pairs of ranks.
        self._route: Callable[[tuple[range, ...], tuple[range, ...]], Route]
        self._route = functools.cache(functools.partial(route_of, self.rank, order))

        self.pieces: list[nn.Parameter] = []
        self.numbers: list[list[int]] = [[] for _ in self.mine]
        self.of: dict[int, Tensor] = {}
        self._pieces_of: list[list[int]] = [[] for _ in self.model]  # of each parameter, their places
        made: list[list[Any]] = []
        for items in named:
            made.append(self._each(items, sum(map(len, named[: len(made)])), cluster.strands))
        if groups is given:
            self.params: list[Any] = [{**group, "params": pieces} for group, pieces in zip(groups, made, strict=True)]
        else:
            self.params = made[0]
        self.gather_parameters()

    def _each(self, items: Sequence[tuple[str | None, Tensor]], first: int, strands: int) -> list[Any]:
        """The pieces of one group, whose first parameter has that number."""
        made: list[Any] = []
        for index, strand in enumerate(self.mine):
            for number, (name, parameter) in enumerate(items, first):
                memory = torch.empty(len(self._spans[number][index]), dtype=parameter.dtype, device=parameter.device)
                piece = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                self.numbers[index].append(len(self.pieces))
                self._pieces_of[number].append(len(self.pieces))
                self.pieces.append(piece)
                self.of[id(piece)] = parameter
                made.append(piece if name is None else (f"{name}[{strand}/{strands}]", piece))
        return made

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are to be gathered before a step."""
        return True
