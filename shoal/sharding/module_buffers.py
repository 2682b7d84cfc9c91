"""Buffers of modules (BatchNorm's statistics), which one rank sends to all others, as DDP does."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shoal.flat import Span
from shoal.sharding.communication import Communication, run_in_window
from shoal.sharding.flat_views import flat, is_dense
from shoal.sharding.partition import Share, Slice, parcels_of


class ModuleBuffers:
    """The buffers of a module, those that it has at the moment of sharing.

    Args:
        module: the module; None for no buffers.

    Raises:
        ValueError: if a buffer has holes or overlap in its memory.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        for name, buffer in [] if module is None else module.named_buffers():
            if not is_dense(buffer):
                raise ValueError(
                    f"buffer {name!r}, of shape {tuple(buffer.shape)}, does not fill its memory: register a clone of it"
                )

    @torch.no_grad()
    def share(self, communication: Communication, owner: int) -> None:
        """Sends the buffers of rank ``owner`` to all ranks."""
        if self._module is None:
            return
        alike: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for number, buffer in enumerate(self._module.buffers()):
            alike.setdefault((buffer.dtype, buffer.device), {})[number] = flat(buffer)
        for (dtype, _), tensors in alike.items():
            shares: list[Share] = [()] * communication.ranks
            shares[owner] = tuple(Slice(number, Span(0, tensor.numel())) for number, tensor in tensors.items())
            run_in_window(
                partial(communication.share, parcel, tensors) for parcel in parcels_of(shares, dtype.itemsize)
            )
