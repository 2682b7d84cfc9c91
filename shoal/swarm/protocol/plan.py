"""How a round divides its vector: into chunks, and the chunks among the reducers. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.messages import MAX_CHUNK_ELEMENTS, MAX_CHUNKS
from shoal.swarm.protocol.view import Member


class NobodyReduces(ValueError, AssertionError):
    """No peer of the group can reduce anything: each has bandwidth 0. (An AssertionError too, as in the reference.)"""


def best_shares(bandwidths: Sequence[float], auxiliary: Sequence[float] = ()) -> list[float]:
    """The fractions of the vector that members with these bandwidths reduce in the fastest round; they add up to 1.

    Args:
        bandwidths: of all members, in any one unit, finite and not negative; a member with 0 reduces nothing (a client)
            but sends its input and gets the result as all do.
        auxiliary: those of members that have no input and want no result; their shares come last.

    Raises NobodyReduces if all are 0.

    [Note: the fastest division]
    Let n members average a vector of length 1, member i with bandwidth b_i reducing the share w_i. It sends what others
    reduce, 1 - w_i, and its share's average to n - 1 members: 1 + (n - 2) w_i in all, and it receives as much. So its
    link is busy for t_i = (1 + (n - 2) w_i) / b_i, both ways at once where links are full duplex (where they are not,
    all times double). Which w makes the largest t_i smallest? (hivemind solves the same linear program by an interior
    point method: load_balancing.py.)

    For n > 2, let all who reduce end at the same time t: then w_i = (t b_i - 1) / (n - 2), which is positive where
    t b_i > 1. If k members reduce, the sum of w_i being 1 gives t = (n - 2 + k) / (sum of their b_i). They are the k
    fastest: were a slower one among them and a faster one not, t b_i > 1 would hold for the faster one too. And k is
    the largest number for which the slowest of them still has t b_i > 1: those left out have t b_i <= 1, so even with a
    share of nothing they end no sooner than t, and any share of theirs would end after t. No other w ends before t: a
    member that reduces less leaves more to the others, of whom one then ends later.

    A member left out ends at 1 / b_i, which may be after t: then it alone says when the round ends, several divisions
    are equally fast, and this one is the fastest for everyone else. For n = 2 all divisions are equally fast, for n = 1
    there is one: they are divided by bandwidth.

    An auxiliary member only gets and returns its share, n times: t_i = n w_i / b_i, so w_i = t b_i / n whatever the
    others do. With a for the sum of their b_i, t = (n - 2 + k) / (sum of the k b_i + a (n - 2) / n). For n = 2 the
    members end at 1 / b_i whatever they reduce, so w_i is at most what an auxiliary can do until then.
    """
    fastest = max((*bandwidths, *auxiliary), default=0.0)
    if not fastest > 0:
        raise NobodyReduces(
            "every peer of the group has bandwidth 0, so none can reduce: give one a bandwidth, or None for not known"
        )
    members, helpers = [b / fastest for b in bandwidths], [b / fastest for b in auxiliary]
    size = len(members)
    if size <= 2 and any(members):
        # The shares of the members change nothing, so helpers get no more than they can reduce until the members end.
        end = max(1 / b for b in members if b) if size == 2 else 0.0
        lent = [min(b / sum(members + helpers), end * b / size) for b in helpers]
        left = 1 - sum(lent)
        shares = [left * (b / sum(members)) for b in members] + lent  # the quotient first: it can't overflow
    elif size <= 2:
        shares = members + helpers
    else:
        total = sum(helpers) * (size - 2) / size
        end = (size - 2) / total if total else math.inf
        for reducers, bandwidth in enumerate(sorted(members, reverse=True), start=1):
            if end * bandwidth <= 1:
                break
            total += bandwidth
            end = (size - 2 + reducers) / total
        shares = [max(0.0, (end * b - 1) / (size - 2)) for b in members] + [end * b / size for b in helpers]
    return [share / sum(shares) for share in shares]


def filled(bandwidths: Sequence[float | None]) -> list[float]:
    """The bandwidths, where the mean of those above 0 (1 if there is none) replaces unknown ones."""
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    mean = math.fsum(bandwidth / len(known) for bandwidth in known) if known else 1.0
    return [mean if bandwidth is None else bandwidth for bandwidth in bandwidths]


def load_balance_peers(vector_size: int, bandwidths: Sequence[float | None], min_size: int = 0) -> tuple[int, ...]:
    """How many elements of a vector each peer reduces in the fastest round, by `best_shares`.

    >>> load_balance_peers(60, [0.55, 0.44, 0.40])
    (35, 16, 9)

    Args:
        vector_size: elements to divide, at least 0.
        bandwidths: of each peer, in any one unit, not negative. 0: it reduces nothing. None: not known, taken for the
            mean of those that are known and not 0; if none is, all peers with None share alike.
        min_size: a peer that would reduce fewer elements reduces nothing, unless all would.

    Returns as many numbers as there are bandwidths, with the sum `vector_size`.

    Raises ValueError for a negative or infinite number, NobodyReduces (a ValueError, too) if nobody can reduce.
    """
    if vector_size < 0:
        raise ValueError(f"vector_size={vector_size}: give a number of elements, at least 0")
    given = [None if bandwidth is None else float(bandwidth) for bandwidth in bandwidths]
    if any(bandwidth is not None and not 0 <= bandwidth < math.inf for bandwidth in given):
        raise ValueError(f"bandwidths={list(bandwidths)}: give finite numbers, at least 0, or None for not known")
    exact = [vector_size * share for share in best_shares(filled(given))]
    if max(exact) >= min_size:
        exact = [size if size >= min_size else 0.0 for size in exact]
        exact = [vector_size * size / (math.fsum(exact) or 1.0) for size in exact]
    sizes = [math.floor(size) for size in exact]
    # The elements left by rounding down go to the peers that lost most by it.
    by_loss = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_loss[: vector_size - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32: the longer a chunk, the less often a thread needs the GIL
SMALLEST_CHUNK = 1 << 12
CHUNKS_PER_REDUCER = 4  # of a small vector: enough to overlap sending, reducing and receiving
WORTH_ELEMENTS = 1 << 17  # half a MiB of float32: below that, the fixed cost of chunks is most of a round


def largest_chunk(itemsizes: Iterable[int]) -> int:
    """The largest number of elements of a chunk: CHUNK_ELEMENTS, or less for elements of many bytes."""
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
    starts = ((buffer, start, size) for buffer, size in enumerate(sizes) for start in range(0, size, elements))
    table = [ChunkSpan(buffer, start, min(start + elements, size)) for buffer, start, size in starts]
    if len(table) > MAX_CHUNKS:
        raise ValueError(
            f"{sum(sizes)} elements make {len(table)} chunks of {elements}; at most {MAX_CHUNKS} are allowed"
        )
    return table


def can_divide(members: Sequence[Member]) -> bool:
    """Whether these members can make a round: at least one of them can reduce."""
    return any(_bandwidths(members))


def _bandwidths(members: Sequence[Member]) -> list[float]:
    """The bandwidth with which each member reduces, in any unit; 0 for members that do not reduce."""
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
