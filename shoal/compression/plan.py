"""The plan of codecs: which codec encodes which elements of flat buffers.

Chunks are cut without regard to tensors, so a chunk may hold several tensors that have different codecs. Such a chunk
gets a codec that encodes piece by piece. A round cuts chunks as always, and asks once per chunk::

    plan = plan_codecs(compression, layout, TensorRole.GRADIENT)
    codecs = [plan.codec_of(chunk.buffer, chunk.start, chunk.stop) for chunk in chunks]

(If chunks were cut at the borders of tensors, every small tensor between large ones would be a message of its own.)
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Protocol

import torch
from torch import Tensor

from shoal.compression._torch import foreach_copy_
from shoal.compression.codec import Codec, Compression, payload_of
from shoal.compression.floats import REAL_FLOATS
from shoal.compression.info import CompressionInfo, TensorRole
from shoal.compression.kind import KindCodec
from shoal.compression.none import NoCompression
from shoal.compression.statistic import StatisticCodec

_ALIGNMENT: Final = 8


class _Span(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class _Entry(Protocol):
    @property
    def buffer(self) -> int: ...
    @property
    def span(self) -> _Span: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class _Buffer(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def numel(self) -> int: ...


class FlatLayout(Protocol):
    """Where tensors lie in flat buffers, such as ``shoal.flat.Layout``: one after the other, in order, with or without
    padding between them.
    """

    @property
    def buffers(self) -> Sequence[_Buffer]:
        """The buffers, each with ``dtype`` and ``numel``."""

    @property
    def entries(self) -> Sequence[_Entry]:
        """The tensors, each with the number of its ``buffer``, its ``span`` there (``start``, ``stop``) and its
        ``shape``.
        """


@dataclass(frozen=True, slots=True)
class CodecSpan:
    """The elements [start, stop) of flat buffer number `buffer`, and their codec."""

    buffer: int
    start: int
    stop: int
    codec: Codec


@dataclass(frozen=True, slots=True)
class _Group:
    """The pieces of a chunk that have the same codec: their numbers, their sizes, and the sum of their sizes."""

    codec: Codec
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class PiecewiseCodec(Codec):
    """The codec of a chunk whose consecutive pieces have codecs of their own. Made by :meth:`CodecPlan.codec_of`.

    It fits chunks of one size only. The pieces of one codec are joined and encoded together, so many small tensors cost
    no more calls than two, and share their codebooks. The payloads of the codecs follow one another in the order in
    which the codecs first occur, each padded to a multiple of 8 bytes.

    Attributes:
        pieces: the number of elements and the codec of each piece.
    """

    name: ClassVar[str] = "piecewise"
    pieces: tuple[tuple[int, Codec], ...]
    _groups: tuple[_Group, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers: dict[Codec, list[int]] = {}
        for number, (_, codec) in enumerate(self.pieces):
            numbers.setdefault(codec, []).append(number)
        groups = []
        for codec, own in numbers.items():
            sizes = tuple(self.pieces[number][0] for number in own)
            groups.append(_Group(codec, tuple(own), sizes, sum(sizes)))
        object.__setattr__(self, "_groups", tuple(groups))

    @property
    def lossy(self) -> bool:  # type: ignore[override]  # depends on the pieces
        """Whether the codec of any piece is lossy."""
        return any(group.codec.lossy for group in self._groups)

    @property
    def spec(self) -> str:
        """The sizes and codecs of the pieces, for messages. It can't be parsed."""
        return f"piecewise({', '.join(f'{numel} {codec.spec}' for numel, codec in self.pieces)})"

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The sum of the codecs' payload sizes, with padding.

        Raises:
            ValueError: if ``numel`` is not the total size of the pieces.
        """
        if numel != sum(group.numel for group in self._groups):
            raise ValueError(f"{self.spec:.200} is not for a chunk of {numel} elements")
        return sum(_padded(group.codec.encoded_nbytes(group.numel, dtype)) for group in self._groups)

    def _encode(self, chunk: Tensor) -> memoryview:
        payload = payload_of(
            torch.empty(self.encoded_nbytes(chunk.numel(), chunk.dtype), dtype=torch.uint8, device="cpu")
        )
        pieces = torch.split_with_sizes(chunk, [size for size, _ in self.pieces])
        at = 0
        for group in self._groups:
            encoded = group.codec.encode(torch.cat([pieces[number] for number in group.numbers]))
            stop = at + _padded(len(encoded))
            payload[at : at + len(encoded)] = encoded
            payload[at + len(encoded) : stop] = bytes(stop - at - len(encoded))
            at = stop
        return payload

    def _decode(self, payload: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
        wide = dtype is torch.float64 or dtype not in REAL_FLOATS
        values = torch.empty(numel, dtype=dtype if wide else torch.float32, device="cpu")
        pieces = torch.split_with_sizes(values, [size for size, _ in self.pieces])
        at = 0
        for group in self._groups:
            nbytes = group.codec.encoded_nbytes(group.numel, dtype)
            decoded = group.codec.decode(payload[at : at + nbytes], dtype, group.numel)
            parts = torch.split_with_sizes(decoded, group.sizes)
            foreach_copy_([pieces[number] for number in group.numbers], parts)
            at += _padded(nbytes)
        return values


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """The codecs of all elements of some flat buffers. Made by :func:`plan_codecs`.

    Attributes:
        spans: cover every buffer, in order, without gaps. Neighbours in a buffer have different codecs. Padding has the
            codec of the tensor before it. Elements before the first tensor, and buffers without tensors, are not
            compressed.
        buffers: the number of buffers, empty ones included.
        spans_of_results: the spans for the results of a round, if results have other codecs than parts; otherwise None.
    """

    spans: tuple[CodecSpan, ...]
    buffers: int
    spans_of_results: tuple[CodecSpan, ...] | None = None

    @staticmethod
    def of(layout: FlatLayout, codecs: Sequence[Codec]) -> CodecPlan:
        """The plan that gives the tensors of the layout, in order, these codecs.

        Raises:
            ValueError: if there is not one codec for each tensor.
        """
        starts: list[list[tuple[int, Codec]]] = [[(0, NoCompression())] for _ in layout.buffers]
        for entry, codec in zip(layout.entries, codecs, strict=True):
            here = starts[entry.buffer]
            if entry.span.stop == entry.span.start or here[-1][1] == codec:
                continue
            if here[-1][0] == entry.span.start:
                here.pop()
            if not here or here[-1][1] != codec:
                here.append((entry.span.start, codec))
        spans = []
        for buffer, (here, spec) in enumerate(zip(starts, layout.buffers, strict=True)):
            stops = [start for start, _ in here[1:]] + [spec.numel]
            spans += [CodecSpan(buffer, start, stop, codec) for (start, codec), stop in zip(here, stops, strict=True)]
        return CodecPlan(tuple(span for span in spans if span.start < span.stop), len(layout.buffers))

    def __add__(self, other: CodecPlan) -> CodecPlan:
        """The plan for this one's buffers, followed by the other's."""

        def moved(spans: Sequence[CodecSpan]) -> tuple[CodecSpan, ...]:
            return tuple(replace(span, buffer=self.buffers + span.buffer) for span in spans)

        results: tuple[CodecSpan, ...] | None = None
        if self.spans_of_results is not None or other.spans_of_results is not None:
            results = self.results.spans + moved(other.results.spans)
        return CodecPlan(self.spans + moved(other.spans), self.buffers + other.buffers, results)

    @property
    def results(self) -> CodecPlan:
        """The plan for results: this one, unless results have other codecs than parts."""
        return self if self.spans_of_results is None else CodecPlan(self.spans_of_results, self.buffers)

    @property
    def lossy(self) -> bool:
        """Whether any element has a lossy codec."""
        return any(span.codec.lossy for span in (*self.spans, *(self.spans_of_results or ())))

    def codec_of(self, buffer: int, start: int, stop: int) -> Codec:
        """The codec of a chunk, the elements [start, stop) of a buffer. In a round, it is the codec of the chunk's
        parts.

        Raises:
            ValueError: if the chunk is empty or not within the buffer.
        """
        first = bisect.bisect_right(self.spans, (buffer, start), key=lambda span: (span.buffer, span.start)) - 1
        last = bisect.bisect_left(self.spans, (buffer, stop), key=lambda span: (span.buffer, span.start))
        spans = self.spans[max(first, 0) : last]
        if not (spans and spans[0].buffer == buffer and spans[0].start <= start < stop <= spans[-1].stop):
            raise ValueError(f"elements {start} to {stop} of buffer {buffer} are not in the plan")
        if len(spans) == 1:
            return spans[0].codec
        return PiecewiseCodec(tuple((min(s.stop, stop) - max(s.start, start), s.codec) for s in spans))


def plan_codecs(
    compression: Compression,
    layout: FlatLayout,
    roles: TensorRole | Sequence[TensorRole] = TensorRole.UNSPECIFIED,
    keys: Sequence[str | int] | None = None,
    exact: Collection[int] = (),
    kinds: Sequence[str] | None = None,
) -> CodecPlan:
    """Chooses a codec for every element of the flat buffers of a layout. Equal arguments give equal plans on all peers.

    Scalars (tensors of shape ``()``) are never compressed, whatever the compression: compressing them saves nothing,
    and optimizers keep the counts of their steps in them. Statistics of optimizers are encoded so that positive values
    stay positive (see ``shoal.compression.statistic``). Tensors of one role and kind share blocks and codebooks;
    tensors of different roles or kinds do not.

    Args:
        compression: chooses the codecs.
        layout: where the tensors lie.
        roles: one role for all tensors, or one for each. Default: unspecified.
        keys: the key of each tensor; None (the default) for its position in the layout.
        exact: positions of further tensors that are never compressed. Default: none.
        kinds: the kind of each tensor, such as the name of a statistic; None (the default) if all tensors of a role are
            of one kind.

    Returns:
        The plan.

    Raises:
        ValueError: if there is not one role, one key and one kind for each tensor, or if the compression has no codec
            for a tensor.
    """
    if compression.parts is not compression.results:
        parts = plan_codecs(compression.parts, layout, roles, keys, exact, kinds)
        results = plan_codecs(compression.results, layout, roles, keys, exact, kinds)
        return replace(parts, spans_of_results=results.spans)
    count = len(layout.entries)
    roles = [roles] * count if isinstance(roles, TensorRole) else roles
    keys = range(count) if keys is None else keys
    kinds = [""] * count if kinds is None else kinds
    if len(roles) != count or len(keys) != count or len(kinds) != count:
        raise ValueError(
            f"the layout has {count} tensors, but there are {len(roles)} roles, {len(keys)} keys and {len(kinds)} kinds"
        )
    numbers: dict[tuple[TensorRole, str], int] = {}
    codecs: list[Codec] = []
    for position, (key, entry, role, kind) in enumerate(zip(keys, layout.entries, roles, kinds, strict=True)):
        info = CompressionInfo(key, entry.shape, layout.buffers[entry.buffer].dtype, role, kind)
        number = numbers.setdefault((role, kind), len(numbers))
        codec = NoCompression() if not info.shape or position in exact else compression.choose_compression(info)
        if codec.lossy and role is TensorRole.OPTIMIZER:
            codec = StatisticCodec(codec)
        codecs.append(KindCodec(codec, number) if codec.lossy and number else codec)
    return CodecPlan.of(layout, codecs)


def plan_for(compression: Compression, layout: FlatLayout, infos: Sequence[CompressionInfo] | None = None) -> CodecPlan:
    """The plan of a layout of whose tensors these are the infos, which give their names, roles and kinds. None: the
    plan of tensors without roles, each named by its position.

    Raises:
        ValueError: as `plan_codecs`.
    """
    if infos is None:
        return plan_codecs(compression, layout)
    roles, keys, kinds = [info.role for info in infos], [info.key for info in infos], [info.kind for info in infos]
    return plan_codecs(compression, layout, roles, keys, kinds=kinds)
