"""Spans: what is in them, where they meet, how they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.flat import Span

spans = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: Span(min(ends), max(ends)))


@given(spans, spans)
def test_intersection_has_the_elements_of_both(first: Span, second: Span) -> None:
    both = set(range(first.start, first.stop)) & set(range(second.start, second.stop))
    met = first.intersect(second)
    assert set(range(met.start, met.stop)) == both
    assert len(met) == len(both)
    assert bool(met) == bool(both)


@given(spans, st.integers(1, 70))
def test_split_covers_the_span_in_order_with_full_pieces(span: Span, n_elements: int) -> None:
    pieces = span.split(n_elements)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(span.start, span.stop))
    assert all(len(piece) == n_elements for piece in pieces[:-1])
    assert all(0 < len(piece) <= n_elements for piece in pieces)


def test_slice_selects_the_elements() -> None:
    assert list(range(10))[Span(2, 5).slice] == [2, 3, 4]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_impossible_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"start={start}, stop={stop}"):
        Span(start, stop)


def test_split_into_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="n_elements=0"):
        Span(0, 4).split(0)
