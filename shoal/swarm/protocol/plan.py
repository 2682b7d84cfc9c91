"""Divides the vector of a round into chunks, and the chunks among the reducers. Pure functions."""

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
Told = Mapping[bytes, Rates]  # by key: the rates of its links that a member reports


class NobodyReduces(ValueError, AssertionError):
    """No peer of the group can reduce anything, because each has bandwidth 0. (It is an AssertionError, too, as in
    hivemind.)"""


def best_shares(
    bandwidths: Sequence[float], auxiliary: Sequence[float] = (), slow: Sequence[SlowLink] = ()
) -> list[float]:
    """The fractions of the vector that members with these bandwidths reduce in the fastest round; they add up to 1.

    Args:
        bandwidths: the bandwidths of the contributing members, in any one unit, finite and not negative. A member with
            0 (a client) reduces nothing, but sends its input and receives the result like all others.
        auxiliary: the bandwidths of members that have no input and receive no result; their shares come last.
        slow: links with a lower rate than the bandwidths of their two members, each way and in the same unit, above 0.
            Members are numbered like their shares.

    Raises:
        NobodyReduces: if all bandwidths are 0.

    [Note: the fastest division]
    Let n members average a vector of length 1. Member i has bandwidth b_i and reduces the share w_i. It sends what
    others reduce, 1 - w_i, and the average of its share to n - 1 members. That is 1 + (n - 2) w_i in all, and it
    receives as much. So its link is busy for t_i = (1 + (n - 2) w_i) / b_i, in both directions at once on full-duplex
    links (on others, all times double). We look for the w that minimises the largest t_i. (hivemind solves the same
    linear program by an interior point method: load_balancing.py.)

    For n > 2, let all reducers end at the same time t. Then w_i = (t b_i - 1) / (n - 2), which is positive if t b_i >
    1. If k members reduce, their w_i sum to 1, so t = (n - 2 + k) / (sum of their b_i). They are the k fastest members:
    if a slower one reduced and a faster one did not, t b_i > 1 would hold for the faster one too. And k is the largest
    number for which the slowest of the k has t b_i > 1. The others have t b_i <= 1, so they end no sooner than t even
    without a share, and with any share they end after t. No other w ends before t: if a member reduces less, the others
    must reduce more, and one of them ends later.

    A member that reduces nothing ends at 1 / b_i, which may be after t. Then it alone determines the end of the round;
    several divisions are equally fast, and this one is the fastest for all other members. For n = 2 all divisions are
    equally fast, and for n = 1 there is only one; then the shares are proportional to bandwidth.

    An auxiliary member only receives and returns its share, n times: t_i = n w_i / b_i. So w_i = t b_i / n, whatever
    the others do. If a is the sum of the auxiliary b_i, t = (n - 2 + k) / (sum of the k b_i + a (n - 2) / n). For n = 2
    the members end at 1 / b_i whatever they reduce, so an auxiliary member's w_i is at most what it can reduce until
    then.

    The link between i and j carries w_i of one vector or result, and w_j of the other, each way. So a link with the
    rate r is busy for (w_i + w_j) / r; see `_sparing`.
    """
    fastest = max((*bandwidths, *auxiliary), default=0.0)
    if not fastest > 0:
        what = "every peer of the group has bandwidth 0, so none can reduce"
        raise NobodyReduces(f"{what}: give one a bandwidth, or None for not known")
    members, helpers = [b / fastest for b in bandwidths], [b / fastest for b in auxiliary]
    size = len(members)
    if size <= 2 and any(members):
        # The shares of the members change nothing, so helpers get no more than they can reduce until the members end.
        end = max(1 / b for b in members if b) if size == 2 else 0.0
        lent = [min(b / sum(members + helpers), end * b / size) for b in helpers]
        left = 1 - sum(lent)
        shares = [left * (b / sum(members)) for b in members] + lent  # divides first, so that nothing overflows
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
    members: Sequence[float], helpers: Sequence[float], shares: list[float], slow: Sequence[SlowLink], earliest: float
) -> list[float]:
    """The approximate shares of the fastest round with slow links. `shares` are the best ones without slow links, and
    `earliest` is the time at which that round would end.

    [Note: slow links]
    Until the time t, member i can reduce (t b_i - 1) / (n - 2), and an auxiliary member t b_i / n. A slow link allows
    w_i + w_j <= t r; or t' r, if the slowest member sends its own vector until t' > t. The largest possible sum of the
    w grows with t, and the round ends when the sum is 1. Bisection finds that t. For a given t, the largest sum is a
    linear program with two unknowns in each constraint. `_thin` solves it approximately: it starts from what each
    member can do, and takes away from the members with the most slow links. (In 2,000 random cases with 3 to 5 members
    and up to 4 slow links, the round takes 0.05 % longer than the best one on average, and 13 % in the worst case.)
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
    """Lower shares in place until no slow link is overloaded. The members at the most overloaded links are lowered
    together, until one of these links is not overloaded any more or a share is 0."""
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
    """The bandwidths, with unknown ones replaced by the mean of those above 0 (by 1 if there is none)."""
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    mean = math.fsum(bandwidth / len(known) for bandwidth in known) if known else 1.0
    return [mean if bandwidth is None else bandwidth for bandwidth in bandwidths]


def load_balance_peers(vector_size: int, bandwidths: Sequence[float | None], min_size: int = 0) -> tuple[int, ...]:
    """How many elements of a vector each peer reduces, so that the round is as fast as possible.

    >>> load_balance_peers(60, [0.55, 0.44, 0.40])
    (35, 16, 9)

    The note in `best_shares` derives the algorithm, which is Shoal's own. It solves the linear program of hivemind's
    function of the same name in closed form.

    Args:
        vector_size: the number of elements to divide, at least 0.
        bandwidths: the bandwidth of each peer, in any one unit, finite and not negative. A peer with 0 reduces nothing.
            None means not known, and counts as the mean of the known ones above 0; if there is none, all peers with
            None get equal shares.
        min_size: a peer that would reduce fewer elements than this reduces nothing, unless this holds for all peers; 0
            by default.

    Returns:
        The number of elements of each peer, in the order of `bandwidths`; their sum is `vector_size`.

    Raises:
        ValueError: if a number is negative or infinite, or if no peer can reduce because all bandwidths are 0.
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
    """Round numbers with the sum `total` to integers with the same sum. The numbers are rounded down, and those that
    lost the most are then increased by 1."""
    sizes = [math.floor(size) for size in exact]
    by_loss = sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])
    for index in by_loss[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


HALVINGS = 30  # steps of the bisection of a round's time, which give it to a billionth
MAX_SLOW_LINKS = 64  # only the slowest links of all members count: with more of them, slow links are the rule
EVEN = 1.2  # measured rates that differ by a smaller factor count as equal
SOON_SECONDS = 0.2  # links that carry their bytes of a round in this time count as equally fast

CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32: the longer a chunk, the less often a thread needs the GIL
SMALLEST_CHUNK = 1 << 12
CHUNKS_PER_REDUCER = 4  # for a small vector: enough to overlap sending, reducing and receiving
WORTH_ELEMENTS = 1 << 17  # half a MiB of float32; for smaller chunks, their fixed cost is most of the round's time


def largest_chunk(itemsizes: Iterable[int]) -> int:
    """The largest number of elements of a chunk: CHUNK_ELEMENTS, or fewer for large elements. `itemsizes` are their
    sizes in bytes."""
    return min(CHUNK_ELEMENTS, MAX_BUFFER_BYTES // max(itemsizes, default=1))


def chunk_elements(total: int, reducers: int, largest: int = CHUNK_ELEMENTS) -> int:
    """The number of elements of a chunk, for a vector of `total` elements: `largest`; fewer for a small vector, so that
    every reducer gets some chunks; more for a vector that would have too many chunks. At least 2**12, at most 2**20."""
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
    """The chunks of buffers with these sizes, in order. An empty buffer has none. Raises ValueError if there are more
    than MAX_CHUNKS."""
    starts = ((buffer, start, size) for buffer, size in enumerate(sizes) for start in range(0, size, elements))
    table = [ChunkSpan(buffer, start, min(start + elements, size)) for buffer, start, size in starts]
    if len(table) > MAX_CHUNKS:
        made = f"{sum(sizes)} elements make {len(table)} chunks of {elements}"
        raise ValueError(f"{made}; at most {MAX_CHUNKS} are allowed")
    return table


def can_divide(members: Sequence[Member]) -> bool:
    """Whether these members can make a round: at least one of them can reduce."""
    return len(members) == 1 or any(member.reduces or member.addresses for member in members)


def who_reduce(members: Sequence[Member]) -> list[bool]:
    """Whether each of these members reduces in their round. The reducers are the members that can reduce and are not
    relayed; if there is none, relayed members that can reduce; if there is none either, all that can be dialled, or a
    member that is alone."""
    able = [member.reduces for member in members]
    direct = [can and not member.is_relayed for can, member in zip(able, members, strict=True)]
    dialled = [bool(member.addresses) or len(members) == 1 for member in members]
    return next((those for those in (direct, able) if any(those)), dialled)


def _bandwidths(members: Sequence[Member], told: Told, nbytes: float) -> list[float]:
    """The bandwidth with which each member reduces, in any unit; 0 for members that do not reduce."""
    given: list[float | None] = [member.bandwidth for member in members]
    if not any(given):
        soon = max(1.0, 2 * nbytes / SOON_SECONDS)  # about the most that a member sends
        rates = [told[member.key].own if member.key in told else None for member in members]
        given = _evened([None if rate is None else min(rate, soon) for rate in rates])
    reduces = who_reduce(members)
    filled_in = filled([rate if can else 0.0 for rate, can in zip(given, reduces, strict=True)])
    return filled_in if any(filled_in) else [float(can) for can in reduces]


def _evened(rates: Sequence[float | None]) -> list[float | None]:
    """The rates, with similar ones replaced by their mean, so that equal peers get equal shares although their measured
    rates differ. Groups start with the fastest rate; each group has the rates that are nearly as high as its first."""
    groups: list[list[float]] = []
    for rate in sorted((rate for rate in rates if rate is not None), reverse=True):
        if groups and EVEN * rate >= groups[-1][0]:
            groups[-1].append(rate)
        else:
            groups.append([rate])
    means = {rate: math.fsum(group) / len(group) for group in groups for rate in group}
    return [None if rate is None else means[rate] for rate in rates]


def _slow_links(members: Sequence[Member], told: Told, nbytes: float) -> list[tuple[bytes, bytes, float]]:
    """The links that members report as slow and that are too slow for this round. A report counts if both ends of the
    link make it, or if half of the other members report slow links to the same member. Otherwise a few liars could make
    one member reduce everything, or nothing."""
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
    chunks: int, members: Sequence[Member], smallest: float = 0.0, told: Told | None = None, nbytes: float = math.inf
) -> tuple[int, ...]:
    """Divide the chunks of a round among its members.

    The shares are those of the fastest round (`best_shares`), rounded to chunks. Clients, members of bandwidth 0 and
    relayed members get no chunks, unless no other member can reduce. Members whose share is less than `smallest` chunks
    get none, unless this holds for all.

    Args:
        chunks: the number of chunks.
        members: the members, in member order.
        smallest: see above.
        told: by key: the rates of its links that a member reports. They count only if no member's user has given a
            bandwidth, which may be in another unit.
        nbytes: the encoded size of the vector. For a small vector, all links are fast enough.

    Returns:
        `len(members) + 1` numbers: where each member's chunks start, and `chunks` at the end.

    Raises:
        NobodyReduces: if all members are clients.
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
