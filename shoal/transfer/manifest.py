"""The manifest of a state: its name, its sizes, and the digest of every chunk. It is sent before any chunk. No
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.plan import ChunkSpan
from shoal.swarm.protocol.tip import DIGEST_BYTES, Tip

FORMAT: Final = 3
CHUNK_ELEMENTS: Final = 1 << 18
"""Elements of a flat buffer in one chunk of a state that is not large: 1 MiB of float32."""

MAX_CHUNK_FACTOR: Final = 3
LARGE_BYTES: Final = 64 << 20

SCALAR_CHUNK_BYTES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 16
MAX_BUFFERS: Final = 256
MAX_RUNS: Final = 1 << 16
MAX_CODECS: Final = 64  # a codec counts once for every kind of values that it encodes
MAX_LAYOUT_BYTES: Final = 3 << 19
MAX_SCALARS_BYTES: Final = 64 << 20
ITEM_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes of flat buffers, by their torch names, and the size of an element."""

MAX_ELEMENTS: Final = MAX_CHUNKS * CHUNK_ELEMENTS

CodecName = Annotated[str, msgspec.Meta(max_length=32)]
Run = tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)], Annotated[int, msgspec.Meta(ge=0, lt=MAX_CODECS)]]


class BufferShape(msgspec.Struct, frozen=True):
    """One flat buffer: the name of its dtype in torch, and its number of elements, padding included."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    numel: Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes.

        Raises:
            ValueError: for a dtype that flat buffers do not have.
        """
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"a buffer has dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True):
    """Identifies a state and every byte of it. Two donors with the same `id` hold the same state, encoded in the same
    way.

    A state has parts: the scalars, as bytes, are part 0, and each flat buffer is one more part. Every part is cut into
    chunks: scalars into chunks of 1 MiB, buffers into chunks of `chunk_elements`. The last chunk of a part may be
    shorter. Chunks are numbered through all parts.

    Attributes:
        tip: epoch, lineage and samples of the state.
        layout: `Layout.to_wire()` of the buffers as msgpack; not decoded here.
        codecs: the wire names of the codecs in which elements of buffers are sent. Scalars are sent as they are.
        runs: (elements, index of their codec in `codecs`), one run after another through all buffers. No run is in two
            buffers.
        buffers: the flat buffers, in the layout's order.
        scalars_nbytes: the size in bytes of everything in the state that is in no buffer.
        digests: the blake3 hash of every chunk as it is sent, 32 bytes each, one after another.
        format: the number of these rules.

    Raises:
        ValueError: (msgspec.ValidationError when it is decoded) if the attributes contradict each other.
    """

    tip: Tip
    layout: Annotated[bytes, msgspec.Meta(max_length=MAX_LAYOUT_BYTES)]
    codecs: Annotated[tuple[CodecName, ...], msgspec.Meta(max_length=MAX_CODECS)]
    runs: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RUNS)]
    buffers: Annotated[tuple[BufferShape, ...], msgspec.Meta(max_length=MAX_BUFFERS)]
    scalars_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SCALARS_BYTES)]
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS * DIGEST_BYTES)]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"this version of Shoal reads manifests of format {FORMAT}, not {self.format}")
        chunks = sum(-(-numel // size) for numel, size in _parts(self.scalars_nbytes, self.buffers))
        if len(self.digests) != chunks * DIGEST_BYTES:
            raise ValueError(f"a state of {chunks} chunks has {chunks * DIGEST_BYTES} bytes of digests, not "
                             f"{len(self.digests)}")  # fmt: skip
        if any(codec >= len(self.codecs) for _, codec in self.runs):
            raise ValueError(f"elements have a codec that is not among the {len(self.codecs)} of the manifest")
        runs_end = [0, *accumulate(numel for numel, _ in self.runs)]
        buffers_end = [0, *accumulate(buffer.numel for buffer in self.buffers)]
        if runs_end[-1] != buffers_end[-1] or not set(runs_end).issuperset(buffers_end):
            raise ValueError("the runs of codecs do not cover the buffers, each from its beginning to its end")

    @classmethod
    def decode(cls, data: memoryview | bytes) -> Manifest:
        """The manifest that `data` describes, which anyone may have sent.

        This allocates no more than the size of `data`. The caller decides how large a state may be.

        Raises:
                ValueError: if it is not a valid manifest. The message says what is wrong.
        """
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a manifest: {error}") from error

    def encode(self) -> bytes:
        """The manifest as it is sent: at most 4 MiB."""
        return msgspec.msgpack.encode(self)

    @property
    def id(self) -> bytes:
        """The blake3 hash of the manifest, 32 bytes."""
        return blake3(self.encode()).digest()

    @property
    def nbytes(self) -> int:
        """The size of the state in memory, in bytes: scalars and buffers."""
        return _nbytes(self.scalars_nbytes, self.buffers)

    @property
    def spans(self) -> Iterator[tuple[int, int, int, str]]:
        """The runs as (buffer, start, stop, name of the codec)."""
        buffer = start = 0
        for numel, codec in self.runs:
            while start == self.buffers[buffer].numel:
                buffer, start = buffer + 1, 0
            yield buffer, start, start + numel, self.codecs[codec]
            start += numel

    @property
    def chunk_digests(self) -> list[bytes]:
        """The digest of each chunk, by its number."""
        return [self.digests[at : at + DIGEST_BYTES] for at in range(0, len(self.digests), DIGEST_BYTES)]

    @property
    def chunks(self) -> list[ChunkSpan]:
        """The chunks by their numbers. The `buffer` of a chunk is the number of its part."""
        return state_chunks(self.scalars_nbytes, self.buffers)


def state_chunks(scalars_nbytes: int, buffers: Sequence[BufferShape]) -> list[ChunkSpan]:
    """The chunks of a state with these sizes, see `Manifest.chunks`."""
    return [
        ChunkSpan(part, start, min(start + size, numel))
        for part, (numel, size) in enumerate(_parts(scalars_nbytes, buffers))
        for start in range(0, numel, size)
    ]


def _parts(scalars_nbytes: int, buffers: Sequence[BufferShape]) -> list[tuple[int, int]]:
    """The number of elements of each part of a state, and of each of its chunks."""
    nbytes = _nbytes(scalars_nbytes, buffers)
    sizes = [(buffer.numel, chunk_elements(nbytes, buffer.itemsize)) for buffer in buffers]
    return [(scalars_nbytes, SCALAR_CHUNK_BYTES), *sizes]


def _nbytes(scalars_nbytes: int, buffers: Sequence[BufferShape]) -> int:
    return scalars_nbytes + sum(buffer.itemsize * buffer.numel for buffer in buffers)


def chunk_elements(nbytes: int, itemsize: int) -> int:
    """The number of elements in one chunk of a buffer.

    Each chunk costs a request and a few turns of both event loops, so a large state has larger chunks. It still has
    many chunks, so that several donors end at about the same time. The largest chunk has three times `CHUNK_ELEMENTS`
    and not four, because it must fit into a message. Its encoding may be a little larger than its elements, if it has
    several codecs, each padded to 8 bytes.

    Args:
        nbytes: the size of the whole state.
        itemsize: the size in bytes of an element of the buffer.
    """
    factor = max(1, min(nbytes // LARGE_BYTES, MAX_CHUNK_FACTOR))
    return min(factor * CHUNK_ELEMENTS, MAX_BUFFER_BYTES // itemsize)


def choose(offers: Collection[Manifest]) -> Manifest:
    """The state to download among the offered ones: the one that most donors hold. If equally many donors hold several,
    it is the one with more samples, then more epochs, then the larger id."""
    holders = Counter(manifest.id for manifest in offers)
    return max(offers, key=lambda offer: (holders[offer.id], offer.tip.samples, offer.tip.epoch, offer.id))


# Made at import, in one thread. If two threads use a type for the first time at the same moment, msgspec shows one of
# them a half-made type, and the process ends with a segmentation fault.
_decoder = msgspec.msgpack.Decoder(Manifest)
