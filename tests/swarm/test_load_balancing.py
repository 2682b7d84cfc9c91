"""Who reduces how much: the division for which the slowest member of a round ends soonest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.plan import best_shares, load_balance_peers

speeds = st.one_of(st.just(0.0), st.floats(0.01, 100.0))


def round_time(shares: Sequence[float], bandwidths: Sequence[float], auxiliary: Sequence[float] = ()) -> float:
    """When the last link is free of what its peer sends (and, as much, receives), for a vector of length 1. A peer of
    bandwidth 0 is a client: what its link can carry is not known."""
    n = len(bandwidths)
    members = [(1 + (n - 2) * share) / b for share, b in zip(shares, bandwidths, strict=False) if b]
    return max(members + [n * share / b for share, b in zip(shares[n:], auxiliary, strict=True) if b])


@given(st.lists(speeds, min_size=2, max_size=12).filter(any), st.lists(speeds, max_size=4), st.data())
def test_no_other_division_is_faster(bandwidths: list[float], auxiliary: list[float], data: st.DataObject) -> None:
    best = best_shares(bandwidths, auxiliary)
    everyone = bandwidths + auxiliary
    assert math.isclose(sum(best), 1.0)
    assert all(share >= 0 for share in best)
    assert all(share == 0 for share, bandwidth in zip(best, everyone, strict=True) if bandwidth == 0)
    weights = [data.draw(st.floats(0, 1)) if bandwidth else 0.0 for bandwidth in everyone]
    if sum(weights) > 1e-3:
        other = [weight / sum(weights) for weight in weights]
        ours, theirs = (round_time(shares, bandwidths, auxiliary) for shares in (best, other))
        assert ours <= theirs * (1 + 1e-9)


@given(st.lists(speeds, min_size=3, max_size=12).filter(any))
def test_all_who_reduce_end_together_and_who_does_not_would_end_later(bandwidths: list[float]) -> None:
    """This pins the division down also where another member alone says when the round ends."""
    shares, n = best_shares(bandwidths), len(bandwidths)
    ends = [(1 + (n - 2) * share) / b for share, b in zip(shares, bandwidths, strict=True) if share > 1e-9]
    assert max(ends) <= min(ends) * (1 + 1e-6)
    left_out = [1 / b for share, b in zip(shares, bandwidths, strict=True) if b and share == 0]
    assert all(end >= max(ends) * (1 - 1e-6) for end in left_out)


@pytest.mark.parametrize(
    ("size", "bandwidths", "at_most"),
    [
        (60, [0.25, 0.25, 0.25, 0.25], [15, 15, 15, 15]),
        (60, [0.55, 0.44, 0.40], [35, 16, 9]),
        (60, [0.44, 0.33, 0.22], [42, 18, 0]),
        (1 << 20, [0.3, 0.5, 0.9, 0.6], [0, 169327, 602629, 276620]),
    ],
)
def test_as_fast_as_a_linear_program(size: int, bandwidths: list[float], at_most: list[int]) -> None:
    ours = [share / size for share in load_balance_peers(size, bandwidths)]
    theirs = [share / size for share in at_most]
    assert round_time(ours, bandwidths) <= round_time(theirs, bandwidths) * (1 + 1e-12)


def test_a_member_of_next_to_no_bandwidth_beside_an_auxiliary() -> None:
    assert best_shares([5e-324], [1.0]) == [1.0, 0.0]


def test_bandwidths_that_are_not_known() -> None:
    assert load_balance_peers(100, (None, None)) == (50, 50)
    assert load_balance_peers(7, (None, None, None)) == (3, 2, 2)
    assert load_balance_peers(100, (0, 0, 0, None, None)) == (0, 0, 0, 50, 50), "nothing is known but who reduces not"
    assert load_balance_peers(90, (3.0, None, 1.0, 0)) == load_balance_peers(90, (3.0, 2.0, 1.0, 0))


def test_shares_that_are_too_small_are_given_to_the_others() -> None:
    assert load_balance_peers(60, [0.55, 0.44, 0.40]) == (35, 16, 9)
    assert load_balance_peers(60, [0.55, 0.44, 0.40], min_size=10) == (41, 19, 0)
    assert load_balance_peers(2, [0.55, 0.20, 0.44], min_size=10) == (1, 0, 1), "all are too small: they stay"
    assert load_balance_peers(0, [1.0, 2.0]) == (0, 0)


def test_nobody_can_reduce() -> None:
    for error in (ValueError, AssertionError):  # the second is what the reference raises
        with pytest.raises(error, match="bandwidth 0"):
            load_balance_peers(100, (0, 0, 0))
    with pytest.raises(ValueError, match="none can reduce"):
        best_shares([])


@pytest.mark.parametrize("bandwidth", [-1.0, math.inf, math.nan])
def test_what_is_no_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="bandwidths="):
        load_balance_peers(100, (1.0, bandwidth))
    with pytest.raises(ValueError, match="vector_size"):
        load_balance_peers(-1, (1.0,))


@given(st.integers(0, 1 << 31), st.lists(st.none() | speeds, min_size=1, max_size=40), st.integers(0, 1 << 20))
def test_every_element_is_given_out(size: int, bandwidths: list[float | None], least: int) -> None:
    if all(bandwidth == 0 for bandwidth in bandwidths):
        return
    sizes = load_balance_peers(size, bandwidths, least)
    assert sum(sizes) == size
    assert all(share >= 0 for share in sizes)
    if max(sizes) > least:
        assert all(share == 0 or share >= least for share in sizes)
