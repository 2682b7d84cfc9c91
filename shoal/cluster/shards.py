"""How the parameters of a model lie at the ranks of a peer, and how values get to where they are stepped and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch import distributed as dist

from shoal.cluster.dtensors import is_dtensor
from shoal.flat import bytes_of


class Shards:
    """The parameters of a model at one rank. `Strands`, `Whole` and `Unsharded` are its kinds.

    In a cluster, the methods that move values are collectives: all ranks call them at the same time.

    Args:
        given: the parameters as the user gave them.
        group: the ranks; None for a single process.

    Attributes:
        given, group: as given.
        params: the same with what an optimizer steps in place of parameters.
        model: in a cluster, the model's parameters, in order.
        of: by the id of a parameter in `params`: the model's parameter.
        are_everywhere: whether each rank steps some, and not only rank 0.
        are_here: whether this rank steps some.
        are_pieces: whether pieces of parameters are stepped, in memory of their own.
        gathers_alone: whether gathering needs no collective.
        is_ahead: whether what is stepped was changed since `spread`, as far as that is known here.
    """

    are_everywhere = are_here = gathers_alone = True
    are_pieces = is_ahead = False

    def __init__(self, given: Any, group: dist.ProcessGroup | None = None) -> None:
        self.given = self.params = given
        self.group, self._source = group, 0 if group is None else dist.get_global_rank(group, 0)
        self.model: list[Tensor] = []
        self.of: dict[int, Tensor] = {}
        self._apart: Sequence[Tensor] = ()  # what is stepped and is no parameter of the model
        self._alike: Sequence[Tensor] = ()  # of the model; all ranks have gradients of the same ones

    def gather_for_step(self) -> None:
        """Copy the gradients of the model to what is stepped."""

    def gather_parameters(self) -> None:
        """Set what is stepped to the values of the model, which the user may have loaded."""

    @torch.no_grad()
    def spread(self, more: Iterable[Tensor]) -> None:
        """Copy what is stepped to the model at all ranks. Also copy the tensors in `more`, which each rank holds whole,
        from rank 0."""
        self._spread()
        self.is_ahead = False
        if self.group is not None:
            for tensor in more:
                self._broadcast(tensor.detach())

    def _spread(self) -> None:
        """Copy what is stepped to the model."""

    def _broadcast(self, tensor: Tensor) -> None:
        """Copy a tensor from rank 0. Sends a contiguous copy, because ranks may have the tensor with other strides."""
        sent = tensor.contiguous()
        dist.broadcast(sent, self._source, group=self.group)
        if sent is not tensor:
            tensor.copy_(sent)

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradients of the model's parameters, and of what is stepped in their place. For a process alone,
        its optimizer clears them, and this does nothing."""
        for stepped in self._apart:
            stepped.grad = None
        for parameter in self.model:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # -- what ranks compare

    @property
    def gradients(self) -> bytes:
        """Which of the parameters have a gradient, a byte for each. They must be equal at all ranks."""
        return bytes([parameter.grad is not None for parameter in self._alike])

    def digest(self) -> bytes:
        """The hash of the gradients of unsharded parameters, which must be equal at all ranks."""
        hasher = blake3()
        for parameter in self.model:
            if not is_dtensor(parameter) and parameter.grad is not None:
                gradient = parameter.grad.detach()
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                hasher.update(bytes_of(gradient.to("cpu").contiguous()))
        return hasher.digest()


class Unsharded(Shards):
    """The parameters of a process alone: the model's own are stepped, so nothing has to get anywhere."""

    gradients = b""  # there is nobody to compare with
