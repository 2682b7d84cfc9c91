"""The state that an averager shares, as it is sent: plain data and tensors, made a snapshot of, and made from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shoal.averaging.vector import plan_of
from shoal.compression import Compression, CompressionInfo, NoCompression
from shoal.flat import FlatBuffer, Layout
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded


def snapshot_of(
    tip: Tip,
    data: Any,
    tensors: Sequence[torch.Tensor],
    compression: Compression = NoCompression(),  # noqa: B008
    infos: Sequence[CompressionInfo] | None = None,
) -> Snapshot:
    """A copy of `tensors` in flat memory, with `data` (plain data that msgpack can write), to be sent so. `infos` are
    the tensors' names and roles, if there are any."""
    memory = FlatBuffer(Layout.of(tensors).on("cpu"), recycled=True)
    memory.copy_from(tensors)
    layout = msgspec.msgpack.encode(memory.layout.to_wire())
    return Snapshot(tip, layout, memory.flat, msgspec.msgpack.encode(data), plan_of(compression, memory.layout, infos))


def state_of(state: Downloaded) -> tuple[Any, list[torch.Tensor]]:
    """What `snapshot_of` was given: (data, tensors); the tensors are views of the downloaded buffers. Raises ValueError
    if what donors sent is no such thing."""
    layout = Layout.from_wire(msgspec.msgpack.decode(state.manifest.layout))
    if [(b.numel, b.dtype) for b in layout.buffers] != [(b.numel(), b.dtype) for b in state.buffers]:
        raise ValueError("the state's layout does not describe its buffers")
    tensors = [state.buffers[entry.buffer][entry.span.slice].view(entry.shape) for entry in layout.entries]
    return msgspec.msgpack.decode(state.scalars), tensors
