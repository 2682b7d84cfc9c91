"""How a round divides its vector: into chunks, and the chunks among the reducers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.load_balancing import best_shares, filled
from shoal.swarm.protocol.member import Member
from shoal.swarm.protocol.messages import MAX_CHUNK_ELEMENTS, MAX_CHUNKS

CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32: the longer a chunk, the more seldom a thread needs the GIL
SMALLEST_CHUNK = 1 << 12
CHUNKS_PER_REDUCER = 4  # of a small vector: enough to overlap sending, reducing and receiving
WORTH_ELEMENTS = 1 << 17  # half a MiB of float32: with chunks below that, what each costs by itself is most of a round


def largest_chunk(itemsizes: Iterable[int]) -> int:
    """How many elements of so many bytes each a chunk may have: CHUNK_ELEMENTS, less where one is wide."""
    return min(CHUNK_ELEMENTS, MAX_BUFFER_BYTES // max(itemsizes, default=1))


def chunk_elements(total: int, reducers: int, largest: int = CHUNK_ELEMENTS) -> int:
    """How many elements a chunk has, for a vector of `total` elements: `largest`, less for small vectors so that every
    reducer gets some, more for vectors that would have too many chunks. At least 2**12, at most 2**20."""
    span = -(-total // max(1, reducers))
    size = -(-span // CHUNKS_PER_REDUCER)
    if span >= WORTH_ELEMENTS:  # two chunks still overlap
        size = max(size, min(WORTH_ELEMENTS, -(-span // 2)))
    size = max(SMALLEST_CHUNK, min(largest, MAX_CHUNK_ELEMENTS, -(-size // SMALLEST_CHUNK) * SMALLEST_CHUNK))
    while -(-total // size) > MAX_CHUNKS // 2 and size < MAX_CHUNK_ELEMENTS:
        size = min(2 * size, MAX_CHUNK_ELEMENTS)
    return size


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk: elements [start, stop) of flat buffer number `buffer`."""

    buffer: int
    start: int
    stop: int


def chunk_table(sizes: Sequence[int], elements: int) -> list[ChunkSpan]:
    """The chunks of buffers with so many elements, in order; none of an empty buffer. Raises ValueError if there are
    more than MAX_CHUNKS."""
    table = [
        ChunkSpan(buffer, start, min(start + elements, size))
        for buffer, size in enumerate(sizes)
        for start in range(0, size, elements)
    ]
    if len(table) > MAX_CHUNKS:
        raise ValueError(
            f"{sum(sizes)} elements make {len(table)} chunks of {elements}; at most {MAX_CHUNKS} are allowed"
        )
    return table


def can_divide(members: Sequence[Member]) -> bool:
    """Whether these members can make a round: somebody is there to reduce."""
    return any(_bandwidths(members))


def _bandwidths(members: Sequence[Member]) -> list[float]:
    """With how much each member reduces, in any unit; 0 of those that do not reduce."""
    bandwidths = filled([member.bandwidth if member.reduces else 0.0 for member in members])
    if not any(bandwidths):
        bandwidths = [1.0 if member.addresses or len(members) == 1 else 0.0 for member in members]
    return bandwidths


def divide(chunks: int, members: Sequence[Member], smallest: float = 0.0) -> tuple[int, ...]:
    """Where each member's chunks start, and `chunks` at the end: `len(members) + 1` numbers.

    The shares are those of the fastest round (`load_balancing.best_shares`), to a chunk. Clients and members of
    bandwidth zero get nothing, unless nobody else is there to reduce; members whose share has less than `smallest`
    chunks get nothing, unless all are such. Raises NobodyReduces if all are clients.
    """
    bandwidths = _bandwidths(members)
    parts = [b for member, b in zip(members, bandwidths, strict=True) if member.contributes]
    auxiliary = [b for member, b in zip(members, bandwidths, strict=True) if not member.contributes]
    shares = best_shares(parts, auxiliary)
    if 0 < smallest <= max(shares) * chunks:
        shares = [share if share * chunks >= smallest else 0.0 for share in shares]
        shares = [share / sum(shares) for share in shares]
    own, lent = iter(shares[: len(parts)]), iter(shares[len(parts) :])
    starts, before = [0], 0.0
    for member in members:
        before += next(own if member.contributes else lent)
        starts.append(min(chunks, round(chunks * before)))
    return (*starts[:-1], chunks)
