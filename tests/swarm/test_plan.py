"""How a vector is divided: every element in exactly one chunk, every chunk to one reducer, by bandwidth."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.messages import MAX_CHUNK_ELEMENTS, MAX_CHUNKS
from shoal.swarm.protocol.plan import (
    CHUNK_ELEMENTS,
    SMALLEST_CHUNK,
    ChunkSpan,
    best_shares,
    can_divide,
    chunk_elements,
    chunk_table,
    divide,
    largest_chunk,
)
from shoal.swarm.protocol.view import Member, Role
from tests.swarm.rounds import member

groups = st.lists(
    st.builds(
        lambda role, bandwidth: (role, bandwidth),
        st.sampled_from(Role),
        st.sampled_from([0.0, 1.0, 5e-324, 1e18]) | st.floats(0, 1e18),
    ),
    max_size=20,
).map(lambda choices: [member(n, role, bandwidth) for n, (role, bandwidth) in enumerate(choices)])


@given(st.integers(0, 1 << 34), st.integers(0, 1024))
def test_a_chunk_is_within_its_bounds_and_there_are_not_too_many(total: int, reducers: int) -> None:
    size = chunk_elements(total, reducers)
    assert SMALLEST_CHUNK <= size <= MAX_CHUNK_ELEMENTS
    # Half of the bound is left for the ends of many small buffers.
    assert -(-total // size) <= MAX_CHUNKS // 2 or size == MAX_CHUNK_ELEMENTS


def test_sizes_of_chunks() -> None:
    assert chunk_elements(25_000_000, 4) == CHUNK_ELEMENTS
    assert chunk_elements(10, 4) == SMALLEST_CHUNK
    small = chunk_elements(1 << 18, 8)
    assert (1 << 18) // small >= 8, "each reducer gets some of a vector of 1 MiB"
    few = CHUNK_ELEMENTS // 4
    assert chunk_elements(few * MAX_CHUNKS // 2 + 1, 4, few) == 2 * few
    assert largest_chunk([4, 2]) == CHUNK_ELEMENTS
    assert largest_chunk([4, 8]) * 8 == MAX_BUFFER_BYTES


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 120))
def test_every_element_is_in_one_chunk_and_no_chunk_is_in_two_buffers(sizes: list[int], elements: int) -> None:
    table = chunk_table(sizes, elements)
    covered = [(chunk.buffer, at) for chunk in table for at in range(chunk.start, chunk.stop)]
    assert covered == [(buffer, at) for buffer, size in enumerate(sizes) for at in range(size)]
    assert all(0 < chunk.stop - chunk.start <= elements for chunk in table)


def test_the_last_chunk_of_each_buffer_may_be_short() -> None:
    assert chunk_table([5, 0, 2], 4) == [ChunkSpan(0, 0, 4), ChunkSpan(0, 4, 5), ChunkSpan(2, 0, 2)]


def test_a_vector_of_too_many_chunks_is_an_error_that_counts_them() -> None:
    assert len(chunk_table([MAX_CHUNKS], 1)) == MAX_CHUNKS
    with pytest.raises(ValueError, match=f"make {MAX_CHUNKS + 1} chunks of 1; at most {MAX_CHUNKS}"):
        chunk_table([MAX_CHUNKS + 1], 1)


@given(st.integers(0, 500), groups)
def test_all_chunks_are_given_out_as_the_fastest_round_has_it(chunks: int, group: list[Member]) -> None:
    if not can_divide(group):
        with pytest.raises(ValueError, match="none can reduce"):
            divide(chunks, group)
        return
    starts = divide(chunks, group)
    assert starts[0] == 0
    assert starts[-1] == chunks
    assert list(starts) == sorted(starts)
    given_out = [stop - start for start, stop in pairwise(starts)]
    bandwidths = [m.bandwidth if m.reduces else 0.0 for m in group]
    members = [b for m, b in zip(group, bandwidths, strict=True) if m.contributes]
    helpers = [b for m, b in zip(group, bandwidths, strict=True) if not m.contributes]
    ordered = [m for m in group if m.contributes] + [m for m in group if not m.contributes]
    best = dict(zip((m.key for m in ordered), best_shares(members, helpers) if any(bandwidths) else [], strict=False))
    for m, share in zip(group, given_out, strict=True):
        if any(bandwidths):
            assert abs(share - chunks * best[m.key]) <= 1.0 + 1e-6
        if not m.addresses and len(group) > 1:
            assert share == 0, "nobody can dial a client"


def test_who_reduces() -> None:
    slow, fast, client = member(1), member(2, bandwidth=3.0), member(3, Role.CLIENT, 100.0)
    helper = member(4, Role.AUXILIARY, 4.0)
    assert divide(16, [slow, fast, client, helper]) == (0, 0, 6, 6, 16)  # the slow one is busy with its own vector
    assert divide(16, [slow, member(2, bandwidth=3.0), member(5, bandwidth=4.0)]) == (0, 0, 5, 16)
    assert divide(4, [member(1, bandwidth=0.0), member(2)]) == (0, 0, 4)
    # With bandwidth zero everywhere, those who can be dialled share it; alone, whoever is there does it.
    assert divide(4, [member(1, bandwidth=0.0), client, member(4, bandwidth=0.0)]) == (0, 2, 2, 4)
    assert divide(4, [client]) == (0, 4)
    assert can_divide([client])
    assert not can_divide([client, member(5, Role.CLIENT)])
    assert not can_divide([])
