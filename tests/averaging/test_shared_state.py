"""What an averager shares comes back as it was; what donors made up is refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from shoal.compression import NoCompression, plan_codecs
from shoal.transfer.donor import Copies, FrozenState
from shoal.transfer.manifest import BufferShape, Manifest
from shoal.transfer.transfer import Downloaded
from tests.swarm.rounds import TIP


def snapshot_of(data: object, tensors: Sequence[torch.Tensor]) -> FrozenState:
    memory = Copies.of(tensors).memory
    return FrozenState.of(TIP, memory, data, plan_codecs(NoCompression(), memory.layout))


def downloaded(snapshot: FrozenState, buffers: Sequence[torch.Tensor], layout: bytes) -> Downloaded:
    shapes = tuple(BufferShape(str(b.dtype).removeprefix("torch."), b.numel()) for b in buffers)
    chunks = len(buffers) + 1  # small buffers, and the data
    runs = tuple((shape.numel, 0) for shape in shapes)
    manifest = Manifest(TIP, layout, ("none",), runs, shapes, len(snapshot.scalars), bytes(32 * chunks))
    return Downloaded(manifest, list(buffers), False, snapshot.scalars, {}, {}, 0, 0.0)


def test_data_and_tensors_come_back() -> None:
    tensors = [torch.randn(3, 2), torch.randn(()), torch.randn(5).double()]
    snapshot = snapshot_of({"epoch": 3}, tensors)
    state = downloaded(snapshot, snapshot.buffers, snapshot.layout)
    assert msgspec.msgpack.decode(state.scalars) == {"epoch": 3}
    loaded = state.tensors()
    assert all(torch.equal(a, b) for a, b in zip(loaded, tensors, strict=True))


@pytest.mark.parametrize("kind", ["fewer elements", "another dtype", "a buffer too few"])
def test_a_layout_that_does_not_describe_the_buffers_is_refused(kind: str) -> None:
    snapshot = snapshot_of({}, [torch.randn(40), torch.randn(5).double()])
    first, second = snapshot.buffers
    buffers = {
        "fewer elements": [first[:8], second],
        "another dtype": [first.to(torch.int32), second],
        "a buffer too few": [first],
    }[kind]
    with pytest.raises(ValueError, match="does not describe its buffers"):
        downloaded(snapshot, buffers, snapshot.layout).tensors()


def test_a_layout_that_is_none_is_refused() -> None:
    snapshot = snapshot_of({}, [torch.randn(40)])
    for layout in (b"\xc1", msgspec.msgpack.encode([1, [["float32", [-4]]]])):
        damaged = downloaded(snapshot, snapshot.buffers, layout)
        with pytest.raises(ValueError):  # noqa: PT011
            damaged.tensors()
