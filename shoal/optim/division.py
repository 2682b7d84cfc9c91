"""How the state of a run is divided into parts. In a run of single processes it has one part. In a run with strands,
each strand is a part, and a rank has those of its strands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from blake3 import blake3
from torch import Tensor

from shoal.swarm.protocol.tip import DIGEST_BYTES

T = TypeVar("T")


def in_order(carriers: Sequence[int], by_rank: Sequence[Sequence[T]]) -> list[T]:
    """Sort values that each rank has given for its own parts into the order of all parts.

    Args:
        carriers: the rank that has each part.
        by_rank: the values of each rank.
    """
    of_rank = [iter(said) for said in by_rank]
    return [next(of_rank[rank]) for rank in carriers]


def name_of(carriers: Sequence[int], by_rank: Sequence[bytes]) -> bytes:
    """The hash of the names of all parts. Each rank gives the names of its own parts, of 32 bytes, one after the
    other."""
    named = [[names[at : at + DIGEST_BYTES] for at in range(0, len(names), DIGEST_BYTES)] for names in by_rank]
    return blake3(b"".join(in_order(carriers, named))).digest()


class Division(Protocol):
    """How the tensors that an optimizer steps at this rank belong to parts of the state. "Values" are a sequence with
    one for each of them, in their order: the tensors themselves, copies of them, their names. `shoal.cluster.Strands`
    is a division, too."""

    always_sends_frozen: bool
    """Whether frozen parameters are part of the state, whatever the settings say."""

    @property
    def mine(self) -> Sequence[int]:
        """The numbers of this rank's parts of the state."""

    @property
    def carriers(self) -> Sequence[int]:
        """The rank that has each part of the state."""

    @property
    def model(self) -> Sequence[Tensor]:
        """The model's parameters."""

    def divided(self, values: Sequence[T]) -> list[list[T]]:
        """The values in each part, in the order of the parameters."""

    def hashed(self, values: Sequence[Tensor], flat: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """The contiguous tensors whose hash is the digest of each part. `flat` is the flat memory of the values."""

    def described(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors with the shapes of the model's parameters and the dtypes of the values, which peers compare."""

    def described_names(self, names: Sequence[str]) -> list[str]:
        """The names of the model's parameters, given those of the values; [] if these have none."""

    def described_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with one parameter for each of the model's, given those of the optimizer."""


class Undivided:
    """The model's own parameters: the optimizer steps all of them here, and the state has one part.

    Args:
        model: the parameters.
    """

    always_sends_frozen = False
    mine = carriers = (0,)

    def __init__(self, model: Sequence[Tensor]) -> None:
        self.model = model

    def divided(self, values: Sequence[T]) -> list[list[T]]:
        """See `Division`."""
        return [list(values)]

    def hashed(self, values: Sequence[Tensor], flat: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """See `Division`."""
        return [flat]

    def described(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Division`."""
        return values

    def described_names(self, names: Sequence[str]) -> list[str]:
        """See `Division`."""
        return list(names)

    def described_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See `Division`."""
        return [dict(group) for group in groups]
