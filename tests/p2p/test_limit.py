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


def test_none_is_no_limit():
    assert Limit(None).charge(1 << 40) == 0.0
