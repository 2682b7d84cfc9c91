"""Which tensors an optimizer steps at this rank, and which parts of the run's state these are.

A run of single processes has a state of one part. In a run with strands, each strand is a part, and a rank has those of
its strands. `shoal.cluster.Strands` are `Pieces`, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Pieces(Protocol):
    """The tensors that an optimizer steps at this rank. "Values" are a sequence with one for each of them, in their
    order: the tensors themselves, copies of them, their names."""

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

    @property
    def in_backward(self) -> Sequence[Tensor]:
        """The tensors that have the gradients of a backward pass when they are used."""

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


class Own:
    """The model's own parameters: the optimizer steps all of them here, and the state has one part.

    Args:
        model: the parameters.
    """

    always_sends_frozen = False
    mine = carriers = (0,)

    def __init__(self, model: Sequence[Tensor]) -> None:
        self.model = self.in_backward = model

    def divided(self, values: Sequence[T]) -> list[list[T]]:
        """See `Pieces`."""
        return [list(values)]

    def hashed(self, values: Sequence[Tensor], flat: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """See `Pieces`."""
        return [flat]

    def described(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Pieces`."""
        return values

    def described_names(self, names: Sequence[str]) -> list[str]:
        """See `Pieces`."""
        return list(names)

    def described_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See `Pieces`."""
        return [dict(group) for group in groups]


class OnHost:
    """Copies on the host of other pieces: the optimizer steps these, and gradients come to the model itself.

    Args:
        of: the pieces that are copied.
    """

    def __init__(self, of: Pieces) -> None:
        self.always_sends_frozen, self.mine, self.carriers = of.always_sends_frozen, of.mine, of.carriers
        self.model = self.in_backward = of.model
        self.divided, self.hashed, self.described = of.divided, of.hashed, of.described
        self.described_names, self.described_groups = of.described_names, of.described_groups
