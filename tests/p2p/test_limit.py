"""A rate that is never exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p.limit import Bucket, Limit


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 2)), min_size=1), st.floats(1, 1e6))
def test_who_waits_as_told_never_exceeds_the_rate(passes, rate):
    bucket, now, passed = Bucket(rate), 0.0, 0
    for nbytes, idle in passes:
        passed += nbytes
        now += bucket.charge(nbytes, now)
        assert passed <= rate * now * (1 + 1e-9)  # by rounding
        now += idle


def test_an_idle_time_is_not_saved_up():
    bucket = Bucket(100.0)
    assert bucket.charge(50, 0.0) == 0.5
    assert bucket.charge(50, 0.0) == 1.0  # by another thread
    assert bucket.charge(50, 1000.0) == 0.5


def test_a_limit_of_nothing_is_refused_and_none_is_no_limit():
    with pytest.raises(ValueError, match="lets nothing pass"):
        Limit(0)
    assert Limit(None).charge(1 << 40) == 0.0
