"""The memory of one layout: one flat tensor per buffer, with its views and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shoal.flat.allocation import zeros
from shoal.flat.layout import Layout
from shoal.flat.memory_views import bytes_of, own_storage
from shoal.flat.span import Span


class FlatBuffer:
    """Owns the memory of a layout. It starts as zeros. Nothing here writes to the padding, so the padding stays zero.

    Args:
        layout: the layout to allocate. Buffers on the meta device get no memory, as everywhere in torch.
        pinned: allocate CPU memory that a GPU can access directly; needs a GPU. Default: False.
        recycled: reuse large CPU memory, see `shoal.flat.allocation.zeros`. Default: False.
    """

    def __init__(self, layout: Layout, *, pinned: bool = False, recycled: bool = False) -> None:
        self._layout = layout
        self._flat = tuple(
            zeros(spec.numel, spec.dtype, recycled)
            if spec.device.type == "cpu" and not pinned
            else torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device, pin_memory=spec.device.type == "cpu")
            for spec in layout.buffers
        )
        self._parts: list[Tensor] | None = None  # made once, at the first call of views(): 10 µs each
        # Made once: a slice of a memoryview takes 0.1 µs, a new memoryview 0.6 to 14 µs.
        self._bytes = tuple(bytes_of(flat) if flat.device.type == "cpu" else None for flat in self._flat)

    @classmethod
    def adopt(cls, tensors: Iterable[Tensor], *, pinned: bool = False) -> FlatBuffer:
        """Moves these tensors into new flat memory: copies their values there, and makes ``tensor.data`` views of it.

        The tensor objects stay the same and keep their ``grad``, ``requires_grad`` and hooks. Their strides become
        contiguous. Views of them that were taken before keep the old memory.

        Args:
            tensors: the tensors, each once.
            pinned: as in the constructor.

        Returns:
            The buffer, whose layout has these tensors in order.

        Raises:
            ValueError: if two of the tensors are the same object or share memory, because moving them would untie tied
                tensors (give each once, as ``module.parameters()`` does); if one is of a tensor subclass, such as
                DTensor; and as :meth:`Layout.of`. Nothing is changed then.
        """
        tensors = list(tensors)
        buffer = cls.for_adoption(tensors, pinned=pinned)
        buffer.copy_from(tensors)
        for tensor, view in zip(tensors, buffer.views(), strict=True):
            tensor.data = view
        return buffer

    @classmethod
    def for_adoption(cls, tensors: Sequence[Tensor], *, pinned: bool = False) -> FlatBuffer:
        """Allocates the flat memory into which these tensors can move. Changes nothing; arguments and errors are those
        of :meth:`adopt`.
        """
        for index, tensor in enumerate(tensors):
            if type(tensor.detach()) is not Tensor:
                raise ValueError(
                    f"tensor {index} is a {type(tensor.detach()).__name__}: flat memory holds plain tensors only, and "
                    "none that are sharded over ranks (fully_shard: give shoal.Optimizer cluster=) or quantized"
                )
        refuse_shared_memory(tensors)
        return cls(Layout.of(tensors), pinned=pinned)

    @property
    def layout(self) -> Layout:
        """The layout of this memory."""
        return self._layout

    @property
    def flat(self) -> list[Tensor]:
        """The buffers themselves: 1-D tensors, one per ``layout.buffers``, padding included."""
        return list(self._flat)

    def views(self) -> list[Tensor]:
        """The tensors of the layout, in its order and shapes, as new views of the flat memory.

        The views of each tensor have a storage of their own; `own_storage` says why.
        """
        if self._parts is None:
            self._parts = [own_storage(self._flat[entry.buffer][entry.span.slice]) for entry in self._layout.entries]
        return [part.view(entry.shape) for part, entry in zip(self._parts, self._layout.entries, strict=True)]

    def copy_from(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values of ``tensors`` into the flat memory, converted as by ``Tensor.copy_``. Autograd does not
        see the copy.

        Args:
            tensors: one tensor per entry of the layout, with its shape, of any dtype, device and strides.

        Raises:
            ValueError: if the number of tensors or a shape differs from the layout. Nothing is copied then.
        """
        entries = self._layout.entries
        if len(tensors) != len(entries):
            raise ValueError(f"the layout has {len(entries)} tensors, got {len(tensors)}")
        for index, (tensor, entry) in enumerate(zip(tensors, entries, strict=True)):
            if tensor.shape != entry.shape:
                raise ValueError(
                    f"tensor {index} has shape {tuple(tensor.shape)}, but the layout has {entry.shape} there"
                )
        with torch.no_grad():
            for view, tensor in zip(self.views(), tensors, strict=True):
                view.copy_(tensor)

    def bytes(self, buffer_index: int, span: Span) -> memoryview:
        """The bytes of a span of a CPU buffer: a writable view of the same memory, which it keeps alive.

        Args:
            buffer_index: the number of the buffer in ``layout.buffers``.
            span: elements of that buffer.

        Raises:
            ValueError: if there is no such buffer, if it is not on the CPU, or if the span leaves it.
        """
        if not 0 <= buffer_index < len(self._flat):
            raise ValueError(f"there are {len(self._flat)} buffers, got buffer_index={buffer_index}")
        spec, data = self._layout.buffers[buffer_index], self._bytes[buffer_index]
        if data is None:
            raise ValueError(f"buffer {buffer_index} is on {spec.device}; only CPU memory has bytes")
        if span.stop > spec.numel:
            raise ValueError(f"{span} leaves buffer {buffer_index}, which has {spec.numel} elements")
        itemsize = spec.dtype.itemsize
        return data[span.start * itemsize : span.stop * itemsize]


def refuse_shared_memory(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError if two tensors share memory, or are the same object. Empty and meta tensors have no memory to
    share.

    It compares the memory between first and last element, so interleaved tensors count as sharing too.
    """
    ranges = []
    for index, tensor in enumerate(tensors):
        if tensor.numel() and tensor.layout is torch.strided and tensor.device.type != "meta":
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            ranges.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), index))
    ranges.sort()
    for (device, _, stop, index), (next_device, next_start, _, next_index) in pairwise(ranges):
        if device == next_device and next_start < stop:
            first, second = sorted((index, next_index))
            raise ValueError(
                f"tensors {first} and {second} share memory: moving them would untie them, so give each only once"
            )
