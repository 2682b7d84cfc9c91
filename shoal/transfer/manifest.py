"""What a state consists of, before any of it is sent: its name, its sizes, and the digest of every chunk. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from shoal.p2p.identity import PeerID
from shoal.p2p.transport import MAX_BUFFER_BYTES
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
MAX_CODECS: Final = 64  # each counts once for every kind of values that it is for
MAX_LAYOUT_BYTES: Final = 3 << 19
MAX_SCALARS_BYTES: Final = 64 << 20
ITEM_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The dtypes that flat buffers have, by their torch names, and the size of an element."""


CodecName = Annotated[str, msgspec.Meta(max_length=32)]
Run = tuple[
    Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS * CHUNK_ELEMENTS)],
    Annotated[int, msgspec.Meta(ge=0, lt=MAX_CODECS)],
]


@dataclass(frozen=True, slots=True)
class StateChunk:
    """The unit of a state's download: elements `[start, stop)` of flat buffer number `buffer`, or bytes of the scalars
    if `buffer` is None."""

    buffer: int | None
    start: int
    stop: int


class BufferShape(msgspec.Struct, frozen=True):
    """One flat buffer: the name of its dtype in torch, and its number of elements, padding included."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    numel: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS * CHUNK_ELEMENTS)]

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Raises ValueError for a dtype that flat buffers don't have."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"a buffer has dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True):
    """Names a state and every byte of it. Two donors hold the same state, encoded alike, if their `id` is equal.

    Chunks are numbered: first those of the scalars, 1 MiB each, then of each buffer in turn those of its elements,
    `chunk_elements` each; the last of each may be shorter.

    Attributes:
        tip: epoch, lineage and samples of the state.
        layout: `Layout.to_wire()` of the buffers as msgpack; not looked into here.
        codecs: the wire names of the codecs in which elements of buffers are sent. Scalars are sent as they are.
        runs: (elements, number of their codec in `codecs`), one run after another through all buffers; none is in two
            of them.
        buffers: the flat buffers, in the layout's order.
        scalars_nbytes: bytes of everything in the state that is in no buffer.
        digests: blake3 of every chunk as it is sent, 32 bytes each, one after another.
        format: the number of these rules.

    Making or decoding one raises ValueError (msgspec.ValidationError) if its parts contradict each other.
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
        nbytes = self.nbytes
        chunks = -(-self.scalars_nbytes // SCALAR_CHUNK_BYTES)
        chunks += sum(-(-buffer.numel // chunk_elements(nbytes, buffer.itemsize)) for buffer in self.buffers)
        if len(self.digests) != chunks * DIGEST_BYTES:
            raise ValueError(f"a state of {chunks} chunks has {chunks * DIGEST_BYTES} bytes of digests, not "
                             f"{len(self.digests)}")  # fmt: skip
        self._check_runs()

    def _check_runs(self) -> None:
        if any(codec >= len(self.codecs) for _, codec in self.runs):
            raise ValueError(f"elements have a codec that is not among the {len(self.codecs)} of the manifest")
        numels = [numel for numel, _ in self.runs]
        borders = list(accumulate(buffer.numel for buffer in self.buffers))
        reached = {0, *accumulate(numels)}
        if sum(numels) != sum(buffer.numel for buffer in self.buffers) or not reached.issuperset(borders):
            raise ValueError("the runs of codecs do not cover the buffers, each from its beginning to its end")

    @classmethod
    def decode(cls, data: memoryview | bytes) -> Manifest:
        """The manifest that `data`, from whomever, describes. Raises ValueError that says what is wrong with it.

        It allocates no more than the data's own size; how large the state would be is for the caller to judge.
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
        """32 bytes that stand for all of it."""
        return blake3(self.encode()).digest()

    @property
    def nbytes(self) -> int:
        """The size of the state in memory: of the buffers and the scalars."""
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
    def chunks(self) -> list[StateChunk]:
        """What each chunk is, by its number."""
        return list(state_chunks(self.scalars_nbytes, self.buffers))


def _nbytes(scalars_nbytes: int, buffers: Sequence[BufferShape]) -> int:
    return scalars_nbytes + sum(buffer.itemsize * buffer.numel for buffer in buffers)


def chunk_elements(nbytes: int, itemsize: int) -> int:
    """Elements in one chunk of a state of `nbytes`, for a buffer whose elements take `itemsize` bytes.

    Each chunk costs a request and a few turns of both loops, so a large state has larger ones. It still has many,
    so that several donors end at about the same time. Three times `CHUNK_ELEMENTS` and not four: a chunk of several
    codecs, each filled up to 8 bytes, may be a little larger than its elements, and must fit into a message.
    """
    factor = max(1, min(nbytes // LARGE_BYTES, MAX_CHUNK_FACTOR))
    return min(factor * CHUNK_ELEMENTS, MAX_BUFFER_BYTES // itemsize)


def state_chunks(scalars_nbytes: int, buffers: Sequence[BufferShape]) -> Iterator[StateChunk]:
    """The chunks, in order, of a state with so many bytes of scalars and these buffers."""
    nbytes = _nbytes(scalars_nbytes, buffers)
    for start in range(0, scalars_nbytes, SCALAR_CHUNK_BYTES):
        yield StateChunk(None, start, min(start + SCALAR_CHUNK_BYTES, scalars_nbytes))
    for number, buffer in enumerate(buffers):
        size = chunk_elements(nbytes, buffer.itemsize)
        for start in range(0, buffer.numel, size):
            yield StateChunk(number, start, min(start + size, buffer.numel))


def choose(offers: Mapping[PeerID, Manifest]) -> bytes:
    """The id of the state to download: the one that most donors hold.

    Of those that equally many hold, the one with more samples behind it, then more epochs, then the larger id. Raises
    ValueError if nobody offers any.
    """
    if not offers:
        raise ValueError("nobody offers a state")
    by_id = {manifest.id: manifest for manifest in offers.values()}
    holders = Counter(manifest.id for manifest in offers.values())
    return max(by_id, key=lambda id: (holders[id], by_id[id].tip.samples, by_id[id].tip.epoch, id))


# Made at import, in one thread: msgspec lets two threads that meet a type for the first time see it half made, and the
# process dies of a segmentation fault.
_decoder = msgspec.msgpack.Decoder(Manifest)
