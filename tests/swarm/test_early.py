"""Chunks that came before their plan are kept for it, but not without bounds."""

from __future__ import annotations

import pytest

from shoal.p2p.errors import Refused
from shoal.swarm.protocol import book as early
from shoal.swarm.protocol.book import EarlyChunks
from shoal.swarm.protocol.messages import Part
from shoal.swarm.protocol.tip import Ballot
from tests.swarm.rounds import key, member

THIS, OTHER = b"r" * 16, b"s" * 16


def part(round_id: bytes, chunk: int) -> Part:
    return Part(round_id, chunk, Ballot(1, key(1)), 1.0)


def test_only_the_chunks_of_the_round_come_back_and_only_once() -> None:
    kept = EarlyChunks()
    for number, round_id in ((2, THIS), (3, OTHER), (1, THIS)):
        kept.keep(member(number).key, part(round_id, number), [])
    assert [(peer, message.chunk) for peer, message, _ in kept.take(THIS)] == [(member(2).key, 2), (member(1).key, 1)]
    assert not kept.take(OTHER)


def test_one_member_can_bring_so_many_and_all_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_EARLY", 2)
    monkeypatch.setattr(early, "MAX_EARLY_BYTES", 10)
    kept = EarlyChunks()
    for chunk in range(2):
        kept.keep(member(1).key, part(THIS, chunk), [memoryview(bytes(4))])
    with pytest.raises(Refused, match="too many"):
        kept.keep(member(1).key, part(THIS, 2), [])
    with pytest.raises(Refused, match="too many"):
        kept.keep(member(2).key, part(THIS, 2), [memoryview(bytes(9))])
    kept.keep(member(2).key, part(THIS, 2), [memoryview(bytes(2))])
    assert len(kept.take(THIS)) == 3


def test_one_that_fills_the_memory_leaves_room_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is dropped does not come again, and whoever sent it would be blamed."""
    monkeypatch.setattr(early, "MAX_EARLY_BYTES", 100)
    kept = EarlyChunks()
    for chunk in range(10):
        kept.keep(member(1).key, part(OTHER, chunk), [memoryview(bytes(10))])
    for number in (2, 3, 4):
        for chunk in range(2):
            kept.keep(member(number).key, part(THIS, chunk), [memoryview(bytes(10))])
    with pytest.raises(Refused, match="too many"):
        kept.keep(member(1).key, part(OTHER, 10), [memoryview(bytes(10))])
    assert len(kept.take(THIS)) == 6


def test_what_is_kept_holds_no_memory_of_a_lane() -> None:
    kept, scratch = EarlyChunks(), bytearray(b"data")
    kept.keep(member(1).key, part(THIS, 1), [memoryview(scratch)])
    scratch.clear()  # nobody refers to it
    [(_, _, buffers)] = kept.take(THIS)
    assert bytes(buffers[0]) == b"data"
