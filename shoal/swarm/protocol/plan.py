"""How a round divides its vector: into chunks, and the chunks among the reducers. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.messages import MAX_CHUNK_ELEMENTS, MAX_CHUNKS
from shoal.swarm.protocol.rates import Rates
from shoal.swarm.protocol.view import Member

SlowLink = tuple[int, int, float]  # the two peers, by number, and the rate


class NobodyReduces(ValueError, AssertionError):
    """No peer of the group can reduce anything: each has bandwidth 0. (An AssertionError too, as in the reference.)"""


def best_shares(
    bandwidths: Sequence[float], auxiliary: Sequence[float] = (), slow: Sequence[SlowLink] = ()
) -> list[float]:
    """The fractions of the vector that members with these bandwidths reduce in the fastest round; they add up to 1.

    Args:
        bandwidths: of all members, in any one unit, finite and not negative; a member with 0 reduces nothing (a client)
            but sends its input and gets the result as all do.
        auxiliary: those of members that have no input and want no result; their shares come last.
        slow: links that carry less than those at their ends do, each way and in the same unit, above 0; the members are
            numbered as their shares are.

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

    The link between i and j carries the share w_i of the one's vector or result, and w_j of the other's, each way. So
    where it carries only r, it is busy for (w_i + w_j) / r; see `_sparing`.
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
        shares = _sparing(members, helpers, shares, [(one, other, rate / fastest) for one, other, rate in slow], end)
    return [share / sum(shares) for share in shares]


def _sparing(
    members: Sequence[float],
    helpers: Sequence[float],
    shares: list[float],
    slow: Sequence[SlowLink],
    earliest: float,
) -> list[float]:
    """The shares of the fastest round, about, if slow links do not let those that would end `earliest` do so.

    [Note: slow links]
    Until the time t, member i can reduce (t b_i - 1) / (n - 2), an auxiliary t b_i / n; and over a slow link
    w_i + w_j <= t r; or t' r, if the slowest member sends its own vector until t' > t. The largest sum of such w grows
    with t, and the round ends when it is 1: that t is found by halving. For one t, the largest sum is a linear program
    with two unknowns in each row. `_thin` solves it nearly: it starts from what each can do and takes away where most
    slow links meet. (Of 2,000 cases of 3 to 5 members and up to 4 slow links, drawn at random, the round takes 0.05 %
    longer than the best one on average, and 13 % in the worst.)
    """
    slowest = min((b for b in members if b), default=math.inf)

    def limits(until: float) -> list[SlowLink]:
        return [(one, other, max(until, 1 / slowest) * rate) for one, other, rate in slow]

    def most(until: float) -> list[float]:
        all_can = [max(0.0, (until * b - 1) / (len(members) - 2)) for b in members]
        all_can += [until * b / len(members) for b in helpers]
        _thin(all_can, limits(until))
        return all_can

    if all(shares[one] + shares[other] <= limit for one, other, limit in limits(earliest)):
        return shares
    early, late = earliest, 2 * earliest
    while sum(most(late)) < 1:
        early, late = late, 2 * late
    for _ in range(HALVINGS):
        middle = (early + late) / 2
        early, late = (middle, late) if sum(most(middle)) < 1 else (early, middle)
    return most(late)


def _thin(shares: list[float], slow: Sequence[SlowLink]) -> None:
    """Lower shares until no slow link has more than it carries. Those that are at the most links that have too much
    fall together, until one of these has no longer too much, or a share is 0."""
    for one, other, most in slow:
        shares[one], shares[other] = min(shares[one], most), min(shares[other], most)
    while over := [
        (one, other, excess)
        for one, other, most in slow
        if (excess := shares[one] + shares[other] - most) > 1e-9 * (shares[one] + shares[other])
    ]:
        times = Counter(peer for one, other, _ in over for peer in (one, other) if shares[peer] > 0)
        highest = max(times.values())
        falling = {peer for peer, count in times.items() if count == highest}
        ends = [excess / both for one, other, excess in over if (both := (one in falling) + (other in falling))]
        step = min(*ends, *(shares[peer] for peer in falling))
        for peer in falling:
            shares[peer] = max(0.0, shares[peer] - step)


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
    return tuple(_rounded(exact, vector_size))


def _rounded(exact: Sequence[float], total: int) -> list[int]:
    """The numbers, which add up to `total`, as whole ones that do so, too: what is left by rounding down goes to those
    that lost most by it."""
    sizes = [math.floor(size) for size in exact]
    by_loss = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_loss[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


HALVINGS = 30  # of the time that a round takes: to a billionth
MAX_SLOW_LINKS = 64  # of all members together, the slowest ones: more would be no exception, and cost time
EVEN = 1.2  # rates that differ by less count as equal: they were measured
SOON_SECONDS = 0.2  # what carries its bytes of a round in that time is as good as any: less cannot be measured well

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
    return len(members) == 1 or any(member.reduces or member.addresses for member in members)


def who_reduce(members: Sequence[Member]) -> list[bool]:
    """Of each of these members, whether it reduces in a round of theirs: those that can and are reached directly, else
    those that are relayed, else all that can be dialled, or who is alone."""
    able = [member.reduces for member in members]
    direct = [can and not member.is_relayed for can, member in zip(able, members, strict=True)]
    dialled = [bool(member.addresses) or len(members) == 1 for member in members]
    return next((those for those in (direct, able) if any(those)), dialled)


def _bandwidths(members: Sequence[Member], told: Mapping[bytes, Rates], nbytes: float) -> list[float]:
    """The bandwidth with which each member reduces, in any unit; 0 for members that do not reduce."""
    given: list[float | None] = [member.bandwidth for member in members]
    if not any(given):
        soon = max(1.0, 2 * nbytes / SOON_SECONDS)  # nobody sends more than that, about
        rates = [told[member.key].own if member.key in told else None for member in members]
        given = _evened([None if rate is None else min(rate, soon) for rate in rates])
    reduces = who_reduce(members)
    filled_in = filled([rate if can else 0.0 for rate, can in zip(given, reduces, strict=True)])
    return filled_in if any(filled_in) else [float(can) for can in reduces]


def _evened(rates: Sequence[float | None]) -> list[float | None]:
    """The rates, where those that differ little are their mean: equal peers get equal shares, though no two measure
    the same. From the fastest on, each group has those that are nearly as fast as its first one."""
    groups: list[list[float]] = []
    for rate in sorted((rate for rate in rates if rate is not None), reverse=True):
        if groups and EVEN * rate >= groups[-1][0]:
            groups[-1].append(rate)
        else:
            groups.append([rate])
    means = {rate: math.fsum(group) / len(group) for group in groups for rate in group}
    return [None if rate is None else means[rate] for rate in rates]


def _slow_links(
    members: Sequence[Member], told: Mapping[bytes, Rates], nbytes: float
) -> list[tuple[bytes, bytes, float]]:
    """The links of which these members say that they are slow, and that are too slow for this round. Both ends must say
    so, or half of the others of the same one: a few that lie could have one reduce everything, or nothing."""
    if any(member.bandwidth for member in members) or not any(rates.slow for rates in told.values()):
        return []
    soon = 2 * nbytes / max(1, len(members)) / SOON_SECONDS
    keys = {member.key for member in members}
    said = {(by, of): rate for by in keys & told.keys() for of, rate in told[by].slow if of in keys and of != by}
    times, enough = Counter(of for _, of in said), max(2, len(members) // 2)
    links: dict[tuple[bytes, bytes], float] = {}
    for (by, of), rate in said.items():
        if rate < soon and ((of, by) in said or times[of] >= enough):
            pair = min(by, of), max(by, of)
            links[pair] = min(rate, links.get(pair, rate))
    slowest = sorted((rate, pair) for pair, rate in links.items())[:MAX_SLOW_LINKS]
    return [(*pair, rate) for rate, pair in slowest]


def divide(
    chunks: int,
    members: Sequence[Member],
    smallest: float = 0.0,
    told: Mapping[bytes, Rates] | None = None,
    nbytes: float = math.inf,
) -> tuple[int, ...]:
    """Where each member's chunks start, and `chunks` at the end: `len(members) + 1` numbers.

    The shares are those of the fastest round (`best_shares`), to a chunk. Clients, members of bandwidth zero, and those
    that are relayed get nothing, unless nobody else is there to reduce; members whose share has less than `smallest`
    chunks get nothing, unless all are such. Raises NobodyReduces if all are clients.

    Args:
        told: what members say of the rates of their links, by key. It counts where no member's user has given a
            bandwidth: that may be in another unit.
        nbytes: of the vector, as it is sent: what a small one needs, any link carries.
    """
    told = told or {}
    bandwidths = _bandwidths(members, told, nbytes)
    parts = [b for member, b in zip(members, bandwidths, strict=True) if member.contributes]
    auxiliary = [b for member, b in zip(members, bandwidths, strict=True) if not member.contributes]
    in_order = [m.key for m in members if m.contributes] + [m.key for m in members if not m.contributes]
    numbers = {key: number for number, key in enumerate(in_order)}
    slow = [(numbers[one], numbers[other], rate) for one, other, rate in _slow_links(members, told, nbytes)]
    shares = best_shares(parts, auxiliary, slow)
    if 0 < smallest <= max(shares) * chunks:
        shares = [share if share * chunks >= smallest else 0.0 for share in shares]
        shares = [share / sum(shares) for share in shares]
    lengths = _rounded([chunks * share for share in shares], chunks)
    return (0, *accumulate(lengths[numbers[member.key]] for member in members))
