"""A tensor of which this rank holds some elements, so that a checkpoint can save an unconsolidated state dict.

`torch.distributed.checkpoint` asks a tensor for the parts that a rank holds, as boxes with offsets and sizes in the
whole tensor (the ``_Checkpointable`` protocol, which DTensor has too). A span of a flattened tensor is not one box but
a few: the end of a row, full rows, the beginning of a row, in each dimension. Every box is one stretch of the span's
memory, so nothing is copied. The checkpoint holds the whole tensor in its own shape, for any program that loads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shoal.flat import Span
from shoal.sharding._torch import make_wrapper


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor. Its elements are the consecutive elements ``span`` of the flattened tensor."""

    span: Span
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of(span: Span, shape: Sequence[int]) -> list[Box]:
    """Cuts a span of a flattened tensor of ``shape`` into the fewest boxes; none for an empty span."""
    boxes = []
    start = span.start
    while start < span.stop:
        # Take the largest block of trailing dimensions that begins here and fits, as often as it fits in its dimension.
        dim, block = len(shape) - 1, 1
        while dim > 0 and start % (block * shape[dim]) == 0 and start + block * shape[dim] <= span.stop:
            block *= shape[dim]
            dim -= 1
        count = min((span.stop - start) // block, shape[dim] - start // block % shape[dim]) if shape else 1
        sizes = tuple(1 if d < dim else count if d == dim else shape[d] for d in range(len(shape)))
        offsets = tuple(start // math.prod(shape[d + 1 :]) % shape[d] for d in range(len(shape)))
        boxes.append(Box(Span(start, start + count * block), offsets, sizes))
        start += count * block
    return boxes


class ShardedState(torch.Tensor):
    """A tensor with the shape of its parameter, of which this rank holds only some elements.

    `torch.distributed.checkpoint` can save and load it, and ``load_state_dict`` takes it. It supports nothing else:
    consolidate the state for more.
    """

    _parts: list[tuple[Span, Tensor]]

    @staticmethod
    def of(shape: torch.Size, parts: Sequence[tuple[Span, Tensor]]) -> ShardedState:
        """A tensor of ``shape`` that holds these spans of its elements. Each comes with the 1-D tensor to read and
        write.
        """
        first = parts[0][1]
        wrapper: ShardedState = make_wrapper(ShardedState, shape, dtype=first.dtype, device=first.device)
        wrapper._parts = list(parts)
        return wrapper

    def elements(self, span: Span) -> Tensor:
        """A copy of the elements of ``span``.

        Raises:
            ValueError: if this rank does not hold all of them.
        """
        for held, tensor in self._parts:
            if held.start <= span.start and span.stop <= held.stop:
                return tensor[span.start - held.start : span.stop - held.start].clone()
        raise ValueError(
            f"elements {span.start} to {span.stop} of a sharded state are not on this rank: it was made with another "
            "partition. Load it with torch.distributed.checkpoint, or consolidate before saving"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{func} needs the whole tensor, and this rank holds a part: {_ADVICE}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(f"this state dict is sharded, and this rank holds a part: {_ADVICE}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        return ShardedState.of(self.shape, [(span, tensor.clone()) for span, tensor in self._parts])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spans = ", ".join(f"{span.start}:{span.stop}" for span, _ in self._parts)
        return f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, elements {spans})"

    # --- the _Checkpointable protocol ---------------------------------------------------------------

    def _boxes(self) -> list[tuple[Box, Tensor]]:
        return [
            (box, tensor[box.span.start - span.start : box.span.stop - span.start].view(box.sizes))
            for span, tensor in self._parts
            for box in boxes_of(span, self.shape)
        ]

    def __create_write_items__(self, fqn: str, object: Self) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self.shape,
                ),
            )
            for box, tensor in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, tensor in self._boxes():
            if index.offset == torch.Size(box.offsets):
                return tensor
        raise ValueError(f"this rank holds no part at {index.offset} of {index.fqn}")


_ADVICE = (
    "call consolidate_state_dict() on all ranks and save its target's state_dict(), or use torch.distributed.checkpoint"
)
