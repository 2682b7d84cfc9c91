"""Computes which elements of a parameter move from which rank to which. Works on numbers only, not on tensors.

A span of elements, in row-major order, is a `range`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def strand_of(elements: int, strands: range, count: int) -> range:
    """The span of some consecutive strands in a parameter. It does not depend on the number of ranks.

    Args:
        elements: the number of elements of the parameter.
        strands: the numbers of the strands.
        count: the number of all strands.
    """
    return range(strands.start * elements // count, strands.stop * elements // count)


def shard_of(rows: int, row: int, index: int, count: int) -> range:
    """The span of a shard on dim 0, as torch.chunk cuts it: the last shards may have fewer rows, or none.

    Args:
        rows: the number of rows of the parameter.
        row: the number of elements of a row.
        index: the number of the shard.
        count: the number of all shards.
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
        local: the spans that it copies from itself.
        out: the spans that it sends, as (receiver, span).
        into: the spans that it receives, as (sender, span). The spans between two ranks are in the same order at both.
        exchanged: about how many elements a rank sends or receives at most; the same number at all ranks, and 0 if no
            rank sends any.
    """

    local: tuple[range, ...]
    out: tuple[tuple[int, range], ...]
    into: tuple[tuple[int, range], ...]
    exchanged: int


def moves(has: Sequence[range], wants: Sequence[range], order: Sequence[int]) -> Iterator[tuple[int, int, range]]:
    """Each span that is moved, as (source, destination, span).

    A rank takes the elements that it wants from itself if it has them, and otherwise from the first rank in `order`
    that has them.

    Args:
        has: the elements that each rank has.
        wants: the elements that each rank wants.
        order: the order in which ranks are considered as sources.
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
    """The route of that rank: its part in the `moves`."""
    local, out, into, exchanged = [], [], [], 0
    for source, destination, span in moves(has, wants, order):
        if source == destination == rank:
            local.append(span)
        elif source == rank:
            out.append((destination, span))
        elif destination == rank:
            into.append((source, span))
        exchanged += len(span) if source != destination else 0
    most = max(span.stop for span in (*has, *wants))  # a rank never sends or receives more than all elements
    return Route(tuple(local), tuple(out), tuple(into), min(exchanged, most))
