"""The interfaces of compressions and of codecs. A codec is a compression that encodes.

Both are in this file because each needs the other: a compression chooses a codec for each tensor, and a codec is the
compression that chooses itself. `PartsAndResults`, which `Compression.of` makes, is here for the same reason. Codecs
are built with `payload_of` and `elements_of`. These are less strict than `shoal.flat.memory_views`, because the bytes
come from the network: they start at any address, may be read-only, and have any values.
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
"""The types of payload that can be decoded."""


class Compression(ABC):
    """How tensors are sent: a codec, or a choice of a codec for each tensor. Options such as ``grad_compression`` take
    one.

    A compression is a value: it compares, hashes and prints by its options. `plan_codecs` gives the codecs of all
    elements of a layout.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def spec(self) -> str:
        """A text with the name and the options, which peers compare when they join.

        Two specs are equal exactly if the compressions are equal. :func:`compression_by_spec` makes an equal
        compression from it.
        """

    @abstractmethod
    def choose_compression(self, info: CompressionInfo) -> Codec:
        """The codec for a tensor.

        Args:
            info: the tensor's key, shape, dtype, role and kind.

        Raises:
            ValueError: if this compression has no codec for it.
        """

    @property
    def parts(self) -> Compression:
        """The compression of parts, which members send to the reducer of a chunk: this one, unless it was made by
        `of`.
        """
        return self

    @property
    def results(self) -> Compression:
        """The compression of results, which the reducer sends to all members: this one, unless it was made by `of`."""
        return self

    @staticmethod
    def of(*, parts: Compression, results: Compression) -> Compression:
        """One compression for parts and another for results.

        >>> shoal.compression.Compression.of(parts=TopK(), results=Blockwise4Bit())

        Args:
            parts: the compression of parts, which members send to the reducer of a chunk.
            results: the compression of results, the averages that the reducer sends to all members.

        Raises:
            ValueError: if one of them is no compression, or was made by `of` itself.
        """
        made = PartsAndResults(parts, results)
        return parts if parts == results else made


@dataclass(frozen=True, slots=True)
class PartsAndResults(Compression):
    """One compression for parts, which members send to the reducer of a chunk, and another for results, the averages
    that it sends back. Made by :meth:`Compression.of`.

    Only rounds have parts and results, so no state can be downloaded with it. Each of the two may be adaptive. It can't
    be an option of an adaptive compression.

    Args:
        for_parts: the compression of parts, which members send to the reducer of a chunk.
        for_results: the compression of results, the averages that the reducer sends back.

    Raises:
        ValueError: if one of them is no compression, or is a `PartsAndResults` itself.
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
        """The compression of parts."""
        return self.for_parts

    @property
    def results(self) -> Compression:
        """The compression of results."""
        return self.for_results

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """Always raises, because there are two codecs for each tensor.

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
    print by them. Encoding and decoding may run on any thread. A subclass implements `encoded_nbytes`, `_encode` and
    `_decode`; this class checks their arguments.
    """

    __slots__ = ()

    name: ClassVar[str]
    """The codec's name on the wire and in :func:`codec_by_name`. Never changes once released."""

    lossy: ClassVar[bool]
    """Whether decoded values may differ from the encoded ones."""

    @property
    def spec(self) -> str:
        """The name, for a codec without options; with options, a JSON array of the name and the options."""
        return self.name

    def choose_compression(self, info: CompressionInfo) -> Codec:
        """This codec, for every tensor."""
        return self

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact size in bytes of the payload of a chunk of ``numel`` elements of ``dtype``."""

    def encode(self, chunk: Tensor) -> memoryview:
        """Encodes a chunk.

        The payload keeps its memory alive. That memory may be the chunk's own (see the codec). Then the chunk must not
        be written before the last user of the payload, such as a transport, has finished. Nobody may write to the
        payload.

        Args:
            chunk: a 1-D contiguous CPU tensor of any dtype.

        Returns:
            The payload: ``encoded_nbytes(chunk.numel(), chunk.dtype)`` bytes, as a memoryview of format ``"B"``.

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
        """Decodes a payload, which anyone may have sent.

        Args:
            payload: ``bytes``, a ``bytearray``, or a contiguous ``memoryview`` of any format.
            dtype: the dtype of the chunk that was encoded.
            numel: the number of its elements.

        Returns:
            A 1-D CPU tensor of ``numel`` elements. It is meant to be read once, in ``sum.add_(decoded, alpha=weight)``
            or ``out.copy_(decoded)``, and has the dtype in which these are fastest, which is not always ``dtype``. It
            may share memory with ``payload``, and keeps it alive: write to neither. The values are not checked: they
            can be NaN or infinite.

        Raises:
            TypeError: if the payload is not bytes-like.
            ValueError: if the payload does not have exactly ``encoded_nbytes(numel, dtype)`` bytes, or if no encoder
                can have made it.
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
        """`encode` for a chunk that has been checked."""

    @abstractmethod
    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        """`decode` for a payload of format ``"B"`` whose size has been checked."""


def payload_of(chunk: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes. The memoryview shares this memory and keeps it alive."""
    nbytes = chunk.numel() * chunk.element_size()
    if nbytes == 0:  # a memoryview of zero ctypes elements cannot be cast to bytes
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(chunk.data_ptr())
    array.owner = chunk.untyped_storage()  # type: ignore[attr-defined]  # the memoryview holds the array, that the memory
    return memoryview(array).cast("B")


def elements_of(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """The elements in a payload as a 1-D tensor: a view of the payload if possible, else a copy.

    It copies in three cases: a payload that is not aligned to the element's size (loads from such addresses are
    undefined in C++); a payload that is read-only (torch has no read-only tensors); and ``torch.bool``, where any byte
    but 0 counts as true (torch's results for bytes other than 0 and 1 are undefined).
    """
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    raw = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
    if dtype is torch.bool:
        return raw.ne(0)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
