"""What the redo log keeps: consecutive rounds, while somebody wants them, within its bounds."""

from __future__ import annotations

import pytest

from shoal.p2p.node import Reply
from shoal.swarm.protocol.book import Book, RuleBroken
from shoal.swarm.protocol.messages import After, Commit, Committed, Digests, Fetch
from shoal.swarm.protocol.redo import MAX_ROUNDS, WANTED_SECONDS, RedoLog
from shoal.swarm.protocol.tip import Tip
from tests.swarm.rounds import TIP, begin_of, chunks_of, digest, key, keys, members
from tests.swarm.wire import Digests as Exchange

NBYTES = 8 * 32  # of the result of a round here


def round_after(tip: Tip) -> tuple[Commit, Exchange]:
    begin = begin_of(members(1, 2, 3), tip=tip)
    exchange = Exchange(Book(key(2), begin, chunks_of(begin)), lambda *_: None)
    for chunk in range(8):
        exchange.book.received(chunk, digest("abcdefgh"[chunk]))
    return Commit(tip, begin.round, exchange.book.root(), 3.0, keys(1, 2, 3), members(1, 2, 3)), exchange


def filled(log: RedoLog, count: int, now: float = 0.0) -> list[Commit]:
    commits: list[Commit] = []
    for _ in range(count):
        commit, exchange = round_after(commits[-1].next_tip if commits else TIP)
        log.keep(commit, exchange, now)
        commits.append(commit)
    return commits


def kept(log: RedoLog, commits: list[Commit], now: float = 0.0) -> list[bool]:
    return [log.after(After(commit.tip), now) == commit for commit in commits]


def test_it_keeps_rounds_while_it_is_wanted_and_then_nothing() -> None:
    log = RedoLog(10 * NBYTES)
    assert not any(kept(log, filled(log, 3)))
    log.want(0.0)
    commits = filled(log, 3, 1.0)
    log.look(WANTED_SECONDS - 1.0)
    assert all(kept(log, commits, WANTED_SECONDS - 1.0))
    log.look(WANTED_SECONDS + 1.0)
    assert all(kept(log, commits, WANTED_SECONDS + 1.0)), "it was read"
    log.look(2 * WANTED_SECONDS + 2.0)
    assert not any(kept(log, commits))


def test_it_answers_with_the_plan_and_the_chunks() -> None:
    log = RedoLog(10 * NBYTES)
    log.want(0.0)
    commit, exchange = round_after(TIP)
    exchange.encoded = {3: b"short"}
    log.keep(commit, exchange, 1.0)
    exchange.book.digests[0] = bytes(32)  # the next round writes there
    begin = exchange.book.begin
    assert log.answer(Digests(commit.round), 1.0) == Committed(begin, tuple(map(digest, "abcdefgh")))
    for chunk, data in ((0, digest("a")), (3, b"short")):
        reply = log.answer(Fetch(commit.round, chunk), 1.0)
        assert isinstance(reply, Reply)
        assert bytes(reply.buffers[0]) == data
    with pytest.raises(RuleBroken, match="chunk 8"):
        log.answer(Fetch(commit.round, 8), 1.0)
    assert log.answer(Fetch(bytes(16), 0), 1.0) is None


def test_it_drops_the_oldest_rounds_and_all_before_a_gap() -> None:
    log = RedoLog(2 * NBYTES)
    log.want(0.0)
    commits = filled(log, 4)
    assert kept(log, commits) == [False, False, True, True]
    lost, _ = round_after(commits[-1].next_tip)
    log.keep(lost, None, 0.0)
    assert not any(kept(log, commits)), "they lead to a round that nobody can replay"
    small = RedoLog(NBYTES - 1)
    small.want(0.0)
    assert not any(kept(small, filled(small, 2)))
    many = RedoLog(2 * MAX_ROUNDS * NBYTES)
    many.want(0.0)
    assert sum(kept(many, filled(many, MAX_ROUNDS + 3))) == MAX_ROUNDS
