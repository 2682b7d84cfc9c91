"""Which residual each chunk of one member's exchange leaves: what counts is the version that was committed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from blake3 import blake3

from shoal.averaging.exchange import Exchange, Vector
from shoal.averaging.residual import Residual
from shoal.compression import Blockwise4Bit, Codec, CodecPlan, NoCompression, TopK
from shoal.flat import Layout, bytes_of
from shoal.p2p.leases import Leases
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.messages import Commit, Part, Repair, Result, Source
from shoal.swarm.protocol.tip import Ballot
from tests.averaging.given import given
from tests.codecs import codecs_of
from tests.swarm.rounds import CHUNK, begin_of, key, members

FOUR = Blockwise4Bit()
WEIGHTS = {1: 2.0, 2: 1.0, 3: 5.0}


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), torch.float32, len(values)).float()


class OneMember:
    """Member 1 of three, of whom each reduces one chunk. All it hears of the others is what the test says."""

    def __init__(self, parts: Codec = FOUR, results: Codec | None = None, weight: float = 2.0) -> None:
        self.begin = begin_of(members(1, 2, 3), chunks=3, weights=list(WEIGHTS.values()))
        generator = torch.Generator().manual_seed(0)
        self.inputs = {n: torch.randn(3 * CHUNK, generator=generator) for n in (1, 2, 3)}
        self.output = torch.zeros(3 * CHUNK)
        self.residual = Residual(torch.randn(3 * CHUNK, generator=generator) * 0.01, 1.0)
        self.before = self.residual.values.clone()
        plan = codecs_of([self.output], parts)
        self.parts, self.results = parts, parts if results is None else results
        plan = CodecPlan(plan.spans, plan.buffers, codecs_of([self.output], self.results).spans)
        self.faults: list[tuple[bytes, str]] = []
        self.sent: list[tuple[Sequence[bytes], Part | Result, Sequence[memoryview]]] = []
        self.exchange = Exchange(
            given(self.inputs[1], self.output, plan, [self.residual]), key(1), self.begin,
            lambda keys, message, buffers=(), name=b"": self.sent.append((keys, message, buffers)),
            lambda member, reason: self.faults.append((member, reason)),
        )  # fmt: skip
        self._attempt, self._weight = 1, weight

    def start(self) -> None:
        self.exchange.start(self._weight, Leases())

    def of(self, values: torch.Tensor, chunk: int) -> torch.Tensor:
        return values[chunk * CHUNK : (chunk + 1) * CHUNK]

    def part(self, number: int, chunk: int, payload: bytes | None = None) -> None:
        data = payload or bytes(self.parts.encode(self.of(self.inputs[number], chunk)))
        message = Part(self.begin.round, chunk, self.exchange.book.plan, WEIGHTS[number])
        self.exchange.part(key(number), message, [memoryview(data)])

    def result(self, number: int, chunk: int, value: float = 1.0) -> None:
        data = self.results.encode(torch.full((CHUNK,), value))
        self.exchange.result(key(number), Result(self.begin.round, chunk, self.exchange.book.plan), [data])

    def repair(self, *sources: Source, out: int | None = None, parted: int | None = None) -> list[Source]:
        self._attempt += 1
        if out is not None:
            self.exchange.put_out([key(out)])
        pairs = () if parted is None else ((key(1), key(parted)),)
        ballot = Ballot(self._attempt, key(1))
        return self.exchange.repair(Repair(self.begin.round, ballot, sources, pairs))

    def fetch(self, chunk: int, value: float) -> bytes:
        data = bytes_of(torch.full((CHUNK,), value))
        digest = blake3(data).digest()
        self.repair(Source(chunk, key(3), digest))
        self.exchange.fetched(chunk, digest, data)
        return digest

    def whole(self) -> None:
        """What is still missing arrives."""
        book = self.exchange.book
        for number in (2, 3):
            if key(number) not in {**book.parts[0], **book.out, **book.parted}:
                self.part(number, 0)
        for chunk, owner in book.awaited.items():
            self.result(2 if owner == key(2) else 3, chunk)
        assert book.complete

    # -- what it may owe afterwards

    def quantised(self, chunk: int) -> torch.Tensor:
        part = self.of(self.inputs[1] + self.before, chunk)
        return part - through(self.parts, part)

    def owes(self, chunk: int) -> torch.Tensor:
        assert torch.equal(self.residual.values, self.before), "something has changed before COMMIT"
        assert self.exchange.book.complete
        self.exchange._errors.settle()
        after = self.residual.values.clone()
        self.exchange._errors.settle()
        assert torch.equal(self.residual.values, after)
        return self.of(after, chunk)


def test_a_part_that_was_sent_owes_what_its_codec_lost() -> None:
    one = OneMember(results=NoCompression())
    one.start()
    one.whole()
    assert torch.equal(one.owes(1), one.quantised(1))
    assert torch.equal(one.of(one.residual.values, 2), one.quantised(2))
    assert not one.of(one.residual.values, 0).any(), "its own part was exact"


def test_a_reducer_owes_the_error_of_its_result() -> None:
    one = OneMember()
    one.start()
    one.whole()
    exact = 2 * one.of(one.inputs[1] + one.before, 0)
    for number in (2, 3):
        exact += WEIGHTS[number] * through(FOUR, one.of(one.inputs[number], 0))
    error = (exact / 8 - one.of(one.output, 0)) * 8 / 2
    assert torch.allclose(one.owes(0), error, atol=1e-5)
    assert error.abs().max() > 0.1


def test_who_brings_little_makes_up_for_a_part_of_its_results_errors() -> None:
    """It may bring more next time, and would overshoot."""
    one = OneMember(weight=1e-3)
    one.start()
    one.whole()
    exact = 1e-3 * one.of(one.inputs[1] + one.before, 0)
    for number in (2, 3):
        exact += WEIGHTS[number] * through(FOUR, one.of(one.inputs[number], 0))
    error = exact / 6.001 - one.of(one.output, 0)
    assert torch.allclose(one.owes(0), error * 4 * 3, atol=1e-5)


def test_a_chunk_that_was_sent_twice_owes_once() -> None:
    one = OneMember()
    one.start()
    one.repair(Source(1, key(3), b""), out=2)
    one.whole()
    assert sum(isinstance(m, Part) and m.chunk == 1 for _, m, _ in one.sent) == 2
    assert torch.equal(one.owes(1), one.quantised(1))


def test_a_chunk_that_came_to_this_peer_was_exact() -> None:
    one = OneMember(results=NoCompression())
    one.start()
    one.repair(Source(1, key(1), b""), out=2)
    one.part(3, 1)
    one.whole()
    assert not one.owes(1).any()


def test_a_result_of_the_dead_that_another_has_holds_the_part_that_was_sent() -> None:
    one = OneMember()
    one.start()
    one.exchange.put_out([key(2)])
    one.fetch(1, 7.0)
    one.whole()
    assert torch.equal(one.owes(1), one.quantised(1))


@pytest.mark.parametrize("again", [False, True])
def test_of_two_versions_the_committed_one_counts(again: bool) -> None:
    one = OneMember(results=NoCompression())
    one.start()
    one.repair(Source(1, key(1), b""), out=2)
    one.part(3, 1)
    mine, values = one.exchange.book.digests[1], one.of(one.output, 1).clone()
    assert mine
    one.fetch(1, 7.0)  # the dead had reduced it, too
    if again:
        one.repair(Source(1, key(3), mine))
        one.exchange.fetched(1, mine, bytes_of(values))
    one.whole()
    assert torch.equal(one.owes(1), torch.zeros(CHUNK) if again else one.quantised(1))


def test_a_part_for_one_that_it_is_parted_from_may_not_have_counted() -> None:
    one = OneMember()
    one.start()
    one.repair(parted=2)
    one.fetch(1, 7.0)
    one.whole()
    assert torch.equal(one.owes(1), one.of(one.before, 1))


@pytest.mark.parametrize("same_round", [True, False])
def test_who_misses_commit_and_fetches_the_result_owes_what_it_has_sent(same_round: bool) -> None:
    """Else its next parts make up for the same once more."""
    one = OneMember()
    vector = Vector(Layout.of([one.output]), codecs_of([one.output], FOUR), error_feedback=1)
    vector.inputs.flat[0].copy_(one.inputs[1])
    (residual,) = vector.residuals
    assert residual is not None
    residual.values.copy_(one.before)
    Exchange([vector], key(1), one.begin, lambda *_: None, lambda *_: None).start(2.0, Leases())
    begin = one.begin if same_round else begin_of(members(1, 2, 3), chunks=3, weights=[4.0, 1.0, 5.0])
    again = Exchange([vector], key(1), begin, lambda *_: None, lambda *_: None)
    for chunk in range(3):
        data = bytes_of(torch.full((CHUNK,), float(chunk)))
        again.fetched(chunk, blake3(data).digest(), data)
    vector.settle(Outcome(begin, Commit(begin.tip, begin.round, bytes(32), 8.0, (), ()), {}, False, None))
    for chunk in (1, 2):
        expected = one.quantised(chunk) if same_round else one.of(one.before, chunk)
        assert torch.equal(one.of(residual.values, chunk), expected)
    assert torch.equal(one.of(residual.values, 0), one.of(one.before, 0)), "its own chunk it had not reduced"


def test_a_part_that_was_left_out_changes_nothing() -> None:
    one = OneMember()
    one.inputs[1][CHUNK + 3] = torch.nan
    one.inputs[1][3] = torch.inf
    one.start()
    one.whole()
    assert torch.equal(one.owes(1), one.of(one.before, 1))
    assert torch.equal(one.of(one.residual.values, 0), one.of(one.before, 0))
    assert one.of(one.output, 0).isfinite().all()


def test_without_weight_nothing_was_contributed() -> None:
    one = OneMember(weight=0.0)
    one.start()
    one.whole()
    one.owes(0)
    assert torch.equal(one.residual.values, one.before)


def test_who_sends_what_nobody_has_encoded_is_left_out() -> None:
    one = OneMember(parts=TopK(), results=NoCompression())
    one.start()
    payload = bytearray(TopK().encode(one.of(one.inputs[2], 0)))
    payload[8:11] = b"\xff\xff\xff"  # the first two indices are the last of the chunk
    one.part(2, 0, bytes(payload))
    one.part(3, 0)
    assert one.faults == [(key(2), "its chunk 0 can't be decoded: a top_k payload has indices that do not ascend")]
    expected = (2 * one.of(one.inputs[1] + one.before, 0) + 5 * through(TopK(), one.of(one.inputs[3], 0))) / 7
    assert torch.allclose(one.of(one.output, 0), expected, atol=1e-6)


def test_a_result_that_nobody_has_encoded_breaks_a_rule() -> None:
    one = OneMember(parts=FOUR, results=TopK())
    one.start()
    payload = bytearray(TopK().encode(torch.randn(CHUNK)))
    payload[8:11] = b"\xff\xff\xff"
    with pytest.raises(RuleBroken, match="the result of chunk 1 can't be decoded"):
        one.exchange.result(key(2), Result(one.begin.round, 1, one.exchange.book.plan), [memoryview(payload)])
