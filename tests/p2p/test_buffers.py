"""Buffers are used again, and bounded."""

from __future__ import annotations

import pytest

from shoal.p2p import buffers
from shoal.p2p.buffers import Buffers, NoMemory


def test_a_buffer_is_used_again_for_what_fits_into_it():
    pool = Buffers(1 << 30)
    first = pool.take((1 << 20) + 544)
    first[:4] = b"mine"
    pool.put(first)
    assert bytes(pool.take(1 << 20)[:4]) == b"mine"
    assert pool.take(1 << 20)[:4] == bytes(4)


def test_one_that_somebody_may_look_at_is_not_used_again():
    pool = Buffers(1 << 30)
    first = pool.take(100)
    first[:4] = b"mine"
    pool.put(first, reuse=False)
    assert pool.take(100)[:4] == bytes(4)


def test_so_much_may_be_out_and_so_much_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffers, "KEPT_BYTES", 100 << 10)
    pool = Buffers(200 << 10)
    out = [pool.take(1) for _ in range(3)]  # each 65 KiB
    with pytest.raises(NoMemory):
        pool.take(1)
    for buffer in out:
        pool.put(buffer)
    assert sum(map(len, pool._free.values())) == 1
    pool.take(1)
