"""How the parameters of a model lie at the ranks of a peer, and how values get to where they are stepped and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from shoal.cluster.cluster import Cluster
from shoal.cluster.strands import Strands
from shoal.cluster.whole import Whole


class Shards(Protocol):
    """The parameters of a model at one rank. `Strands`, `Whole` and `Unsharded` are its kinds.

    Attributes:
        given: the parameters as the user gave them.
        params: the same with what an optimizer steps in place of parameters.
        are_everywhere: whether each rank steps some, and not only rank 0.
        are_here: whether this rank steps some.
        are_pieces: whether pieces of parameters are stepped, in memory of their own.
        gathers_alone: whether gathering needs no collective.
        of: by the id of a parameter in `params`: the model's parameter.
        is_ahead: whether what is stepped was changed since `spread`, as far as that is known here.
        gradients: which of the parameters have a gradient, as bits that must be equal at all ranks.
    """

    are_everywhere: bool
    are_here: bool
    are_pieces: bool
    is_ahead: bool
    params: Any
    given: Any
    of: dict[int, Tensor]

    @property
    def gathers_alone(self) -> bool: ...
    @property
    def gradients(self) -> bytes: ...
    def gather_for_step(self) -> None: ...
    def gather_parameters(self) -> None: ...
    def spread(self, more: Iterable[Tensor]) -> None: ...
    def clear(self, set_to_none: bool) -> None: ...
    def digest(self) -> bytes: ...


class Unsharded:
    """The parameters of a process alone: the model's own are stepped, so nothing has to get anywhere.

    Args:
        params: the parameters as the user gave them, or None.
    """

    are_everywhere = are_here = gathers_alone = True
    is_ahead = are_pieces = False
    gradients = b""

    def __init__(self, params: Any) -> None:
        self.given = self.params = params
        self.of: dict[int, Tensor] = {}

    def gather_for_step(self) -> None:
        """The gradients are where they are used."""

    def gather_parameters(self) -> None:
        """The parameters are the model's."""

    def spread(self, more: Iterable[Tensor]) -> None:
        """There are no other ranks."""

    def clear(self, set_to_none: bool) -> None:
        """The optimizer clears the gradients of its own parameters."""

    def digest(self) -> bytes:
        """There is nothing to compare with."""
        return b""


def shards_of(cluster: Cluster | None, params: Any) -> Shards:
    """How the model lies at this rank. In a cluster, all ranks call this at once.

    Raises:
        ValueError: for parameters that can't be cut into strands.
    """
    if cluster is None or params is None or cluster.size == cluster.strands == 1:
        return Unsharded(params)
    if cluster.strands > 1:
        return Strands(cluster, params)
    assert cluster.group is not None
    return Whole(cluster.group, params)
