"""Which elements of a parameter go from which rank to which. Numbers only: nothing here knows tensors.

A span of elements, in row-major order, is a `range`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def strand_of(elements: int, strands: range, count: int) -> range:
    """The span of consecutive strands of `count` in a parameter of that many elements. It does not depend on how many
    ranks there are."""
    return range(strands.start * elements // count, strands.stop * elements // count)


def shard_of(rows: int, row: int, index: int, count: int) -> range:
    """The span of a shard on dim 0, as torch.chunk cuts it: the last shards may have fewer rows, or none.

    Args:
        rows: of the parameter.
        row: the elements of each.
        index: of the shard.
        count: of shards.
    """
    each = -(-rows // count)
    return range(min(index * each, rows) * row, min((index + 1) * each, rows) * row)


def overlap(one: range, other: range) -> range:
    """The elements that both have."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def without(span: range, other: range) -> list[range]:
    """The elements of a span that the other does not have."""
    common = overlap(span, other)
    if not common:
        return [span] if span else []
    return [rest for rest in (range(span.start, common.start), range(common.stop, span.stop)) if rest]


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank does so that all ranks get the elements of one parameter that they want.

    Attributes:
        local: what it copies itself.
        out: what it sends, and to whom.
        into: what it receives, and from whom. The spans between two ranks are in the same order at both.
        exchanged: about how many elements a rank sends or receives at most; the same number at all ranks, and 0 if no
            rank sends any.
    """

    local: tuple[range, ...]
    out: tuple[tuple[int, range], ...]
    into: tuple[tuple[int, range], ...]
    exchanged: int


def moves(has: Sequence[range], wants: Sequence[range], order: Sequence[int]) -> Iterator[tuple[int, int, range]]:
    """Each span that is moved, as (source, destination, span).

    A rank takes what it wants from itself where it has it, and else from the first rank that has it.

    Args:
        has: the elements that each rank has.
        wants: the elements that each rank wants.
        order: in which the ranks are asked.
    """
    for destination, wanted in enumerate(wants):
        left = [wanted] if wanted else []
        for source in (destination, *order):
            for span in left:
                if found := overlap(span, has[source]):
                    yield source, destination, found
            left = [rest for span in left for rest in without(span, has[source])]
            if not left:
                break


def route_of(rank: int, order: Sequence[int], has: Sequence[range], wants: Sequence[range]) -> Route:
    """The part of that rank in the moves."""
    local, out, into, exchanged = [], [], [], 0
    for source, destination, span in moves(has, wants, order):
        if source == destination == rank:
            local.append(span)
        elif source == rank:
            out.append((destination, span))
        elif destination == rank:
            into.append((source, span))
        exchanged += len(span) if source != destination else 0
    most = max(span.stop for span in (*has, *wants))  # all elements: what is sent to all is a rank's share of them
    return Route(tuple(local), tuple(out), tuple(into), min(exchanged, most))
