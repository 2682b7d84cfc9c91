"""Buffers are used again, and bounded."""

from __future__ import annotations

import pytest

from shoal.p2p import buffers
from shoal.p2p.buffers import Buffers


def test_a_buffer_is_used_again_for_what_fits_into_it():
    pool = Buffers(1 << 30)
    first = pool.take((1 << 20) + 544)
    first[:4] = b"mine"
    del first
    second = pool.take(1 << 20)
    assert bytes(second[:4]) == b"mine"
    assert pool.take(1 << 20)[:4] == bytes(4)


def test_one_that_somebody_looks_at_is_not_used_again():
    pool = Buffers(1 << 30)
    look = pool.take(100)[10:20]
    look[:4] = b"mine"
    assert bytes(pool.take(100)[10:14]) == bytes(4)
    assert bytes(look[:4]) == b"mine"


def test_so_much_may_be_out_and_so_much_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", 100 << 10)
    pool = Buffers(200 << 10)
    out = [pool.take(1) for _ in range(3)]  # each 65 KiB
    assert not pool.is_missed
    assert pool.take(1) is None
    assert pool.is_missed
    out.clear()
    assert pool.take(1) is not None
    assert sum(map(len, pool._free.values())) == 0  # one was kept, and is taken
