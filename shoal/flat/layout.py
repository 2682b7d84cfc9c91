"""The layout: where every tensor lies in the flat buffers.

The following rule is part of the wire format and of the schema hash. Tensors keep the order in which they were given.
Each tensor goes to the end of the buffer of its (dtype, device), at the next multiple of 64 bytes. Buffers are in the
order of their first tensor, and also end at a multiple of 64 bytes. So the layout follows from dtypes, shapes and
devices alone. Only dtypes and shapes go over the wire, so a received layout can't have spans that overlap or leave
their buffer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.flat.span import Span

ALIGNMENT: Final = 64
"""Bytes. Every tensor and every buffer starts at a multiple of this, the size of a cache line and of the widest vector
registers.
"""

WIRE_FORMAT: Final = 1
"""The number of the rule above; it changes when the rule does."""

MAX_TENSORS: Final = 2**17
"""Tensors in one layout. This bounds the memory that the description of a received layout can take."""

MAX_DIMS: Final = 64
"""Dimensions of one tensor; torch's own limit."""

MAX_BYTES: Final = 2**42
"""Bytes of all buffers of one layout (4 TiB). Code that allocates memory for a received layout checks `nbytes` against
a smaller bound.
"""

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One flat buffer: ``numel`` elements of ``dtype`` on ``device``, padding included.

    Attributes:
        dtype: the dtype of the elements.
        device: the device of the memory.
        numel: the number of elements, padding included.
    """

    dtype: torch.dtype
    device: torch.device
    numel: int

    @property
    def nbytes(self) -> int:
        """The buffer's size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a layout: the elements ``span`` of buffer number ``buffer``, contiguous in ``shape``.

    Attributes:
        buffer: the number of the buffer in ``Layout.buffers``.
        span: the tensor's elements in the buffer, without padding.
        shape: the tensor's shape.
    """

    buffer: int
    span: Span
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every tensor lies in the flat buffers. Made by :meth:`of` or :meth:`from_wire`, and immutable.

    Attributes:
        buffers: one per (dtype, device), in the order of their first tensor.
        entries: one per tensor, in the order in which the tensors were given.
        schema_hash: 32 bytes, equal exactly if dtypes, shapes and order are equal. It does not depend on devices, or on
            the process, the machine or the torch version.
    """

    buffers: tuple[BufferSpec, ...]
    entries: tuple[TensorEntry, ...]
    schema_hash: bytes

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> Layout:
        """The layout of these tensors. It reads no values, so meta tensors are allowed. Strides do not matter.

        Raises:
            ValueError: if a tensor is sparse or has a dtype without a name on the wire, or beyond `MAX_TENSORS` or
                `MAX_BYTES`.
        """
        specs = []
        for index, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:
                raise ValueError(f"tensor {index} is {tensor.layout}: only strided tensors can live in a flat buffer")
            if tensor.dtype not in _DTYPE_NAMES:
                raise ValueError(f"tensor {index} is of {tensor.dtype}: flat buffers hold {', '.join(_DTYPES)}")
            specs.append((tensor.dtype, tensor.device, tuple(tensor.shape)))
        return _lay_out(specs)

    @staticmethod
    def from_wire(wire: object, device: torch.device | str = "cpu") -> Layout:
        """The layout that :meth:`to_wire` described, with all tensors on ``device``.

        Args:
            wire: the description. It may be any object, because it comes from the network.
            device: the device of all buffers. Default: the CPU.

        Raises:
            ValueError: if ``wire`` is not a layout within the bounds of this module. The message says what is wrong.
        """
        if not isinstance(wire, list | tuple) or len(wire) != 2:
            raise ValueError("a layout is [format, tensors]")
        wire_format, tensors = wire
        if type(wire_format) is not int or wire_format != WIRE_FORMAT:
            raise ValueError(f"this version of Shoal reads layout format {WIRE_FORMAT}, got {wire_format!r:.40}")
        if not isinstance(tensors, list | tuple):
            raise ValueError(f"the tensors of a layout are a list, got {type(tensors).__name__}")
        _check_count(len(tensors))
        place = torch.device(device)
        specs = [_tensor_from_wire(index, item) for index, item in enumerate(tensors)]
        return _lay_out([(dtype, place, shape) for dtype, shape in specs])

    def to_wire(self) -> list[object]:
        """The layout as lists, strings and ints for msgpack: ``[format, [[dtype name, [size, …]], …]]``.

        As in ``schema_hash``, devices are left out: each peer chooses its own.
        """
        return [
            WIRE_FORMAT,
            [[_DTYPE_NAMES[self.buffers[entry.buffer].dtype], list(entry.shape)] for entry in self.entries],
        ]

    def on(self, device: torch.device | str) -> Layout:
        """The layout of the same tensors, all on one device.

        Tensors on several devices are in more buffers than the same tensors on one device. So peers express everything
        that they must agree on in spans of ``layout.on("cpu")``, which is the same for all peers with the same
        ``schema_hash``.
        """
        place = torch.device(device)
        return _lay_out([(self.buffers[entry.buffer].dtype, place, entry.shape) for entry in self.entries])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each buffer."""
        return tuple(buffer.numel for buffer in self.buffers)

    @property
    def nbytes(self) -> int:
        """The size of all buffers together, in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _lay_out(specs: list[tuple[torch.dtype, torch.device, tuple[int, ...]]]) -> Layout:
    _check_count(len(specs))
    places: dict[tuple[torch.dtype, torch.device], int] = {}
    numels: list[int] = []  # elements of each buffer so far
    entries = []
    digest = hashlib.blake2b(digest_size=32, person=f"shoal layout {WIRE_FORMAT}".encode())
    nbytes = 0
    for index, (dtype, device, shape) in enumerate(specs):
        digest.update(f"{_DTYPE_NAMES[dtype]}:{','.join(map(str, shape))};".encode())
        buffer = places.setdefault((dtype, device), len(numels))
        if buffer == len(numels):
            numels.append(0)
        start, numel = numels[buffer], math.prod(shape)
        step = ALIGNMENT // dtype.itemsize
        numels[buffer] = start + -(-numel // step) * step
        nbytes += (numels[buffer] - start) * dtype.itemsize
        if nbytes > MAX_BYTES:
            raise ValueError(f"with tensor {index} of shape {shape} the layout is over {MAX_BYTES} bytes, its bound")
        entries.append(TensorEntry(buffer, Span(start, start + numel), shape))
    buffers = [BufferSpec(dtype, device, numel) for (dtype, device), numel in zip(places, numels, strict=True)]
    return Layout(tuple(buffers), tuple(entries), digest.digest())


def _check_count(tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise ValueError(f"a layout has at most {MAX_TENSORS} tensors, got {tensors}")


def _tensor_from_wire(index: int, item: object) -> tuple[torch.dtype, tuple[int, ...]]:
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise ValueError(f"tensor {index} of the layout is not [dtype, shape]")
    name, shape = item
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"tensor {index} of the layout has unknown dtype {name!r:.40}; known: {', '.join(_DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise ValueError(f"the shape of tensor {index} of the layout is not a list of at most {MAX_DIMS} sizes")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_BYTES:  # `type`, because a bool is an int too
            raise ValueError(f"tensor {index} of the layout has size {size!r:.40}, not an int from 0 to {MAX_BYTES}")
    # torch multiplies the sizes without the zeros for the strides, and refuses a product that overflows.
    if math.prod(size or 1 for size in shape) > MAX_BYTES:
        raise ValueError(f"the shape of tensor {index} of the layout multiplies to more than {MAX_BYTES} elements")
    return _DTYPES[name], tuple(shape)
