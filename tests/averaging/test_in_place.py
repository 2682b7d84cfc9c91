"""Chunks of a round are opened where they belong, and nothing is written there, or sent from there, that is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.averaging.exchange import Exchange
from shoal.compression import Codec, Float16Compression
from shoal.flat import bytes_of
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.p2p.node import Reply
from shoal.swarm.protocol.book import root_of
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.messages import Begin, Carries, Fetch, Part, Repair, Result, Source, name_of
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.protocol.plan import SMALLEST_CHUNK
from shoal.swarm.protocol.redo import RedoLog
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import View
from tests.averaging.given import given
from tests.codecs import codecs_of
from tests.swarm.rounds import TERMS, begin_of, key, member, members, signer

CHUNKS = 4


class Sent(list[tuple[Part | Result, Sequence[memoryview], bytes]]):
    def __call__(
        self, keys: Sequence[bytes], message: Part | Result, buffers: Sequence[memoryview] = (), name: bytes = b""
    ) -> None:
        self.append((message, buffers, name))


def opened(codec: Codec | None = None) -> tuple[Exchange, Begin, torch.Tensor]:
    """The exchange of member 1 of two, of whom each reduces two chunks; and its output."""
    begin = begin_of(members(1, 2), chunks=CHUNKS)
    vector, output = torch.ones(CHUNKS * begin.chunk_elements), torch.zeros(CHUNKS * begin.chunk_elements)
    exchange = Exchange(given(vector, output, codecs_of([vector], codec)), key(1), begin, Sent(), lambda *_: None)
    return exchange, begin, output


def others(exchange: Exchange) -> list[int]:
    """The chunks that member 2 reduces."""
    return [chunk for chunk, owner in enumerate(exchange.book.owners) if owner == key(2)]


def arrive(leases: Leases, begin: Begin, carries: Carries, chunk: int, value: float, source: int = 2) -> bool:
    """The chunk comes over a lane; whether its memory was waiting."""
    target = leases.lease(name_of(begin.round, carries, chunk), PeerID(key(source)), 4 * begin.chunk_elements)
    if target is None:
        return False
    target.memory[:] = bytes_of(torch.full((begin.chunk_elements,), value))
    leases.give_back(target, filled=True)
    return True


def test_results_of_others_are_waited_for_from_the_start_and_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, begin, output = opened()
    leases = Leases()
    chunk, other = others(exchange)
    assert not arrive(leases, begin, Carries.RESULT, chunk, 1.0), "before the start the output is not ours to write"
    exchange.start(1.0, leases)
    assert not arrive(leases, begin, Carries.RESULT, chunk, 1.0, source=3)
    assert arrive(leases, begin, Carries.RESULT, chunk, 7.0)
    monkeypatch.setattr(Codec, "decode", lambda *_: pytest.fail("it was copied"))
    memory = bytes_of(output)[4 * begin.chunk_elements * chunk :][: 4 * begin.chunk_elements]
    exchange.result(key(2), Result(begin.round, chunk, begin.ballot), [memory])
    assert (output[chunk * begin.chunk_elements :][: begin.chunk_elements] == 7.0).all()
    assert exchange.book.digests[chunk]
    assert not arrive(leases, begin, Carries.RESULT, chunk, 9.0), "its digest stands"
    exchange.close()
    assert not arrive(leases, begin, Carries.RESULT, other, 9.0)


def test_what_comes_without_a_lane_is_copied_and_not_waited_for_any_more() -> None:
    exchange, begin, output = opened()
    leases = Leases()
    exchange.start(1.0, leases)
    chunk, _ = others(exchange)
    exchange.result(
        key(2), Result(begin.round, chunk, begin.ballot), [bytes_of(torch.full((begin.chunk_elements,), 3.0))]
    )
    assert (output[chunk * begin.chunk_elements :][: begin.chunk_elements] == 3.0).all()
    assert not arrive(leases, begin, Carries.RESULT, chunk, 9.0)


def test_compressed_results_have_no_memory_that_waits() -> None:
    exchange, begin, _ = opened(Float16Compression())
    leases = Leases()
    exchange.start(1.0, leases)
    assert not arrive(leases, begin, Carries.RESULT, others(exchange)[0], 1.0)


def test_a_repair_changes_who_may_bring_a_chunk() -> None:
    exchange, begin, _ = opened()
    leases = Leases()
    exchange.start(1.0, leases)
    chunk, other = others(exchange)
    ballot = Ballot(begin.ballot.number + 1, key(1))
    exchange.put_out([key(2)])
    exchange.repair(Repair(begin.round, ballot, (Source(chunk, key(1), b""), Source(other, key(3), b""))))
    assert not arrive(leases, begin, Carries.RESULT, chunk, 9.0), "it is mine now"
    assert not arrive(leases, begin, Carries.RESULT, other, 9.0)
    assert arrive(leases, begin, Carries.RESULT, other, 9.0, source=3)


def test_a_fetched_chunk_is_checked_where_it_was_opened_and_has_one_source() -> None:
    exchange, begin, output = opened()
    leases = Leases()
    exchange.start(1.0, leases)
    chunk, other = others(exchange)
    elements = begin.chunk_elements
    right = torch.full((elements,), 5.0)
    digest = root_of([bytes(bytes_of(right))])  # of one thing: its own hash
    exchange.await_fetched(chunk, key(2), leases)
    assert not arrive(leases, begin, Carries.RESULT, chunk, 9.0), "two sources would write at once"
    assert arrive(leases, begin, Carries.FETCHED, chunk, 5.0)
    exchange.fetched(chunk, digest, bytes_of(output)[4 * elements * chunk :][: 4 * elements])
    assert exchange.book.digests[chunk] == digest
    exchange.await_fetched(other, key(2), leases)
    assert arrive(leases, begin, Carries.FETCHED, other, 6.0)
    with pytest.raises(Exception, match="is not the one that was committed"):
        exchange.fetched(other, digest, bytes_of(output)[4 * elements * other :][: 4 * elements])
    assert not exchange.book.digests[other]


def test_parts_that_wait_for_the_user_hold_no_memory_of_a_lane() -> None:
    exchange, begin, output = opened()
    scratch = bytearray(4 * begin.chunk_elements)
    mine = next(chunk for chunk, owner in enumerate(exchange.book.owners) if owner == key(1))
    exchange.part(key(2), Part(begin.round, mine, begin.ballot, 1.0), [memoryview(scratch)])
    scratch.clear()  # nobody refers to it
    exchange.start(1.0, Leases())
    assert (output[mine * begin.chunk_elements :][: begin.chunk_elements] == 0.5).all()


def test_a_chunk_that_is_asked_for_is_a_copy() -> None:
    exchange, begin, output = opened()
    exchange.start(1.0, Leases())
    chunk, _ = others(exchange)
    data = bytes_of(torch.full((begin.chunk_elements,), 3.0))
    exchange.result(key(2), Result(begin.round, chunk, begin.ballot), [data])
    participant = Participant(
        View("run", member(1), lambda key: True), begin.tip, TERMS, [], Silence(15.0, 30.0), signer(1), RedoLog(0)
    )
    participant.offer(Contribution(1.0, lambda begin, send, fault: exchange))
    participant.at.asked[begin.ballot.coordinator] = None  # it has its JOIN
    participant.enter(begin.ballot.coordinator, begin, [], 0.0, relayed=False)
    answer: Any = participant.on_fetch(Fetch(begin.round, chunk))
    assert isinstance(answer, Reply)
    output.zero_()  # the next round
    assert bytes(answer.buffers[0]) == bytes(data)


def test_the_chunks_of_this_file_are_large_enough_to_be_any() -> None:
    assert begin_of(members(1, 2), chunks=CHUNKS).chunk_elements == SMALLEST_CHUNK
