"""A rate that is never exceeded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p.limit import Limit


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 2)), min_size=1), st.floats(1, 1e6))
def test_who_waits_as_told_never_exceeds_the_rate(passes, rate):
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(time, "monotonic", lambda: now)
        limit, passed = Limit(rate), 0
        for nbytes, idle in passes:
            passed += nbytes
            now += limit.charge(nbytes)
            assert passed <= rate * (now - 1000.0) * (1 + 1e-6) + 1e-6  # by rounding
            now += idle


def test_an_idle_time_is_not_saved_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = Limit(100.0)
    assert limit.charge(50) == 0.5
    assert limit.charge(50) == 1.0  # by another thread
    now[0] = 1000.0
    assert limit.charge(50) == 0.5


def test_what_is_urgent_waits_only_for_what_is_urgent_and_the_rest_pays_for_it(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    limit = Limit(100.0)
    assert limit.charge(500) == 5.0
    assert limit.charge(10, urgent=True) == pytest.approx(0.1)
    assert limit.charge(10, urgent=True) == pytest.approx(0.2)
    assert limit.charge(0) == pytest.approx(5.2)


def test_all_together_keep_to_the_rate_whoever_is_urgent(monkeypatch):
    limit = Limit(1e6)
    passed, next_at = [0.0] * 40, [0.0] * 65  # bytes in each second; when each of 64 lanes, and a link, goes on
    while (now := min(next_at)) < len(passed):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        turn = next_at.index(now)
        urgent = turn == 64
        nbytes = 10_000 if urgent else limit.piece
        wait = limit.charge(nbytes, urgent=urgent)
        next_at[turn] = now + (max(wait, 0.05) if urgent else wait)
        passed[int(now)] += nbytes
    # At first each lane passes a piece, and those that wait then do not know of the link's bytes.
    assert max(passed[10:]) <= limit.rate + 2 * limit.piece
    assert sum(passed) <= limit.rate * len(passed) + 64 * limit.piece * 1.3


def test_none_is_no_limit():
    assert Limit(None).charge(1 << 40) == 0.0
