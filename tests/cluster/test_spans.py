"""Which elements go from which rank to which, against sets of single elements."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from shoal.cluster.spans import moves, overlap, route_of, shard_of, strand_of, without


def some_span(numbers: random.Random, elements: int) -> range:
    start, stop = sorted(numbers.choices(range(elements + 1), k=2))
    return range(start, stop)


@pytest.mark.parametrize("elements", [0, 1, 2, 5, 7, 8, 49, 1000])
@pytest.mark.parametrize("strands", [1, 6, 8])
def test_strands_follow_each_other_and_are_those_of_any_number_of_ranks(elements: int, strands: int) -> None:
    each = [strand_of(elements, range(k, k + 1), strands) for k in range(strands)]
    assert [e for span in each for e in span] == list(range(elements))
    assert max(map(len, each)) - min(map(len, each)) <= 1
    for size in (size for size in range(1, strands + 1) if strands % size == 0):
        share = strands // size
        for first in range(0, strands, share):
            carried = strand_of(elements, range(first, first + share), strands)
            assert list(carried) == [e for span in each[first : first + share] for e in span]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("row", [1, 3])
def test_shards_are_those_of_torch_chunk(rows: int, count: int, row: int) -> None:
    parameter = torch.arange(rows * row).view(rows, row)
    chunks = [chunk.flatten().tolist() for chunk in parameter.chunk(count)] if rows else []
    chunks += [[]] * (count - len(chunks))
    shards = [shard_of(rows, row, index, count) for index in range(count)]
    assert [list(shard) for shard in shards] == chunks
    assert all(0 <= shard.start <= shard.stop <= rows * row for shard in shards)


def test_spans_as_sets() -> None:
    numbers = random.Random(0)
    for _ in range(500):
        one, other = some_span(numbers, 8), some_span(numbers, 8)
        assert set(overlap(one, other)) == set(one) & set(other)
        rest = without(one, other)
        assert all(rest)
        assert [e for span in rest for e in span] == sorted(set(one) - set(other))


def test_each_rank_gets_all_that_it_wants_once_from_the_first_that_has_it() -> None:
    numbers = random.Random(1)
    for _ in range(300):
        size, elements = numbers.randrange(1, 6), numbers.randrange(1, 12)
        order = numbers.sample(range(size), size)
        has = [some_span(numbers, elements) for _ in range(size)]
        has[numbers.randrange(size)] = range(elements)
        wants = [some_span(numbers, elements) for _ in range(size)]
        moved = list(moves(has, wants, order))
        for rank, wanted in enumerate(wants):
            came = {e: source for source, destination, span in moved if destination == rank for e in span}
            assert sum(len(span) for _, destination, span in moved if destination == rank) == len(came)
            first = {e: next(r for r in (rank, *order) if e in has[r]) for e in wanted}
            assert came == first


def test_both_ends_of_a_route_agree() -> None:
    numbers = random.Random(2)
    for _ in range(300):
        size, elements = numbers.randrange(1, 6), numbers.randrange(1, 12)
        order = numbers.sample(range(size), size)
        cuts = [0, *sorted(numbers.choices(range(elements + 1), k=size - 1)), elements]
        has = [range(*each) for each in pairwise(cuts)]
        wants = [some_span(numbers, elements) for _ in range(size)]
        routes = [route_of(rank, order, has, wants) for rank in range(size)]
        assert len({route.exchanged for route in routes}) == 1
        assert (routes[0].exchanged > 0) == any(route.out for route in routes)
        for one in range(size):
            assert {e for span in routes[one].local for e in span} == set(has[one]) & set(wants[one])
            for other in range(size):
                sent = [span for rank, span in routes[one].out if rank == other]
                assert sent == [span for rank, span in routes[other].into if rank == one]
