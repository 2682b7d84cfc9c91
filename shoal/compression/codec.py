"""What a compression is, and what a codec is: the compression that encodes.

Both are here because each needs the other: a compression chooses a codec for each tensor, and a codec is the
compression that chooses itself. So is `PartsAndResults`, which `Compression.of` makes. `payload_of` and `elements_of`
are what codecs are made with. They are less strict than `shoal.flat.memory_views`, since the bytes come from the
network: these start at any address, may be read-only, and have any values.
"""

from __future__ import annotations

import ctypes
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.info import CompressionInfo

Payload = bytes | bytearray | memoryview
"""What can be decoded."""


class Compression(ABC):
    """What an option takes that says how tensors travel: a codec, or a choice of a codec for each tensor.

    A compression is a value: it compares, hashes and prints by its options. `plan_codecs` gives the codecs of all
    elements of a layout.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def spec(self) -> str:
        """The compression with its options, as peers compare it when they join. Two specs are equal exactly when the
        compressions are; another peer makes an equal compression of it with :func:`compression_by_spec`."""

    @abstractmethod
    def choose_compression(self, info: CompressionInfo) -> Codec:
        """The codec for a tensor.

        Raises:
            ValueError: if this compression has no codec for it.
        """

    @property
    def parts(self) -> Compression:
        """How parts travel, from members to the reducer of a chunk: as this compression says, unless it is made by
        `of`."""
        return self

    @property
    def results(self) -> Compression:
        """How results travel, from the reducer to all members: as this compression says, unless it is made by `of`."""
        return self

    @staticmethod
    def of(*, parts: Compression, results: Compression) -> Compression:
        """One compression for parts and another for results.

        >>> shoal.compression.Compression.of(parts=TopK(), results=Blockwise4Bit())

        Raises:
            ValueError: if one of them is no compression, or made by `of` itself.
        """
        made = PartsAndResults(parts, results)
        return parts if parts == results else made


@dataclass(frozen=True, slots=True)
class PartsAndResults(Compression):
    """One compression for parts, which members send to the reducer of a chunk, and another for results, the averages
    that come back. Made by :meth:`Compression.of`.

    Only rounds have both, so it can't be what a state is downloaded with. Each of the two may be adaptive; it can't be
    an option of an adaptive compression itself.

    Args:
        for_parts: of what members send to a reducer.
        for_results: of the averages that come back.
    """

    name: ClassVar[str] = "parts_and_results"
    for_parts: Compression
    for_results: Compression

    def __post_init__(self) -> None:
        for name, one in (("parts", self.for_parts), ("results", self.for_results)):
            if not isinstance(one, Compression) or isinstance(one, PartsAndResults):
                raise ValueError(f"{name}={one!r:.60}: give a compression for one of both, such as a codec")

    @property
    def spec(self) -> str:
        """``["parts_and_results", parts, results]``"""
        return json.dumps([self.name, self.for_parts.spec, self.for_results.spec])

    @property
    def parts(self) -> Compression:
        """How parts travel."""
        return self.for_parts

    @property
    def results(self) -> Compression:
        """How results travel."""
        return self.for_results

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """Never a codec, since there are two.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Compression.of(parts=…, results=…) is for rounds: what is downloaded has no parts and results. Give "
            "a compression that is for both"
        )


class Codec(Compression):
    """How a chunk becomes bytes and back.

    A codec is a value: subclasses are frozen dataclasses whose fields are their options, so they compare, hash and
    print by them. Encoding and decoding may run in any thread. A subclass implements `encoded_nbytes`, `_encode` and
    `_decode`; this class checks what goes in.
    """

    __slots__ = ()

    name: ClassVar[str]
    """What the codec is called on the wire and in :func:`codec_by_name`. Never changes once released."""

    lossy: ClassVar[bool]
    """Whether decoding may give other values than were encoded."""

    @property
    def spec(self) -> str:
        """The codec with its options, as peers compare it when they join: the name, for a codec without options."""
        return self.name

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """This codec, for every tensor."""
        return self

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact size in bytes of the payload of a chunk of ``numel`` elements of ``dtype``."""

    def encode(self, chunk: Tensor) -> memoryview:
        """The chunk's payload, ``encoded_nbytes(chunk.numel(), chunk.dtype)`` bytes of format ``"B"``.

        The payload keeps its memory alive. That memory may be the chunk's own (see the codec): then the chunk must not
        be written before the last user of the payload, such as a transport, is done with it. Nobody writes to the
        payload.

        Raises:
            ValueError: if the chunk is not a 1-D contiguous CPU tensor.
        """
        if chunk.dim() != 1 or chunk.device.type != "cpu" or not chunk.is_contiguous():
            raise ValueError(
                f"a chunk is a 1-D contiguous CPU tensor, got shape {tuple(chunk.shape)}, stride {chunk.stride()} "
                f"on {chunk.device}"
            )
        return self._encode(chunk)

    def decode(self, payload: Payload, dtype: torch.dtype, numel: int) -> Tensor:
        """The ``numel`` elements of a chunk of ``dtype``, as a 1-D CPU tensor, from bytes that anyone may have sent.

        ``payload`` is ``bytes``, a ``bytearray``, or a contiguous ``memoryview`` of any format.

        The tensor is meant to be read once, in ``sum.add_(decoded, alpha=weight)`` or ``out.copy_(decoded)``, and has
        the dtype in which these are fastest: not always ``dtype``. It may share memory with ``payload``, and keeps it
        alive: write to neither. The values are not judged: they can be NaN or infinite.

        Raises:
            TypeError: if the payload is not bytes-like.
            ValueError: if it is not of exactly ``encoded_nbytes(numel, dtype)`` bytes, or nobody can have encoded it.
        """
        view = memoryview(payload)
        expected = self.encoded_nbytes(numel, dtype)
        if view.nbytes != expected:
            raise ValueError(
                f"a {self.name} payload of {numel} {dtype} elements has {expected} bytes, got {view.nbytes}"
            )
        return self._decode(view if view.format == "B" or not expected else view.cast("B"), dtype, numel)

    @abstractmethod
    def _encode(self, chunk: Tensor) -> memoryview:
        """`encode` for a chunk that is checked."""

    @abstractmethod
    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        """`decode` for a payload of format ``"B"`` whose size is checked."""


def payload_of(chunk: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, shared and kept alive by the memoryview."""
    nbytes = chunk.numel() * chunk.element_size()
    if nbytes == 0:  # a memoryview of zero ctypes elements cannot be cast to bytes
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(chunk.data_ptr())
    array.owner = chunk.untyped_storage()  # type: ignore[attr-defined]  # the memoryview holds the array, that the memory
    return memoryview(array).cast("B")


def elements_of(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """The elements in a payload as a 1-D tensor: a view of it where that is possible, else a copy.

    Copied are a payload that is not aligned to the element's size (loads from such addresses are undefined in
    C++), one that is read-only (torch has no read-only tensors), and ``torch.bool``, where any byte but 0 counts as
    true (what torch computes with bytes other than 0 and 1 is undefined).
    """
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    raw = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
    if dtype is torch.bool:
        return raw.ne(0)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
