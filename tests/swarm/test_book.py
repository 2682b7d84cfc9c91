"""A member's bookkeeping of a round: parts within a window, results from their owners, nothing that does not belong,
and nothing missing when somebody has left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.book import WINDOW, Book, RuleBroken, root_of
from shoal.swarm.protocol.messages import Begin, Repair, Source
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import Member, Role
from tests.swarm.rounds import begin_of, chunks_of, digest, key, keys, member, members

PLAN = b"p" * 16
LATER = Ballot(2, key(1))


def book_of(me: int, begin: Begin) -> Book:
    return Book(key(me), begin, chunks_of(begin))


@pytest.fixture
def book() -> Book:
    """Member 2 of four, who reduces chunks 2 and 3 of eight."""
    return book_of(2, begin_of(members(1, 2, 3, 4)))


def fill(book: Book, chunk: int, *senders: int) -> None:
    for sender in senders:
        assert book.part_arrived(key(sender), chunk, PLAN, 1.0)


# -- parts out


def test_parts_go_to_the_owners_of_the_chunks_in_turn_and_first_to_the_next_member(book: Book) -> None:
    assert book.next_parts() == [(key(n), c) for n, c in ((3, 4), (4, 6), (1, 0), (3, 5), (4, 7), (1, 1))]
    assert book.next_parts() == []


def test_no_reducer_is_sent_more_than_the_window_until_its_results_come() -> None:
    book = book_of(1, begin_of(members(1, 2), chunks=40))
    sent = [chunk for _, chunk in book.next_parts()]
    assert sent == list(range(20, 20 + WINDOW))
    assert book.next_parts() == []
    assert book.result_arrived(key(2), 20, PLAN)
    assert book.next_parts() == [(key(2), 20 + WINDOW)]
    assert book.next_parts() == []


@given(st.integers(1, 6), st.integers(0, 60), st.randoms(use_true_random=False))
def test_each_part_is_sent_once_to_the_one_who_reduces_it(count: int, chunks: int, rng) -> None:
    begin = begin_of(members(*range(1, count + 1)), chunks=chunks)
    book = book_of(1, begin)
    sent: list[tuple[bytes, int]] = []
    waiting: list[tuple[bytes, int]] = []
    while parts := book.next_parts() or waiting:
        if parts is not waiting:
            sent += parts
            waiting += parts
        under_way = [owner for owner, _ in waiting]
        assert all(under_way.count(owner) <= WINDOW for owner in under_way)
        owner, chunk = waiting.pop(rng.randrange(len(waiting)))
        assert book.result_arrived(owner, chunk, PLAN)
        book.received(chunk, digest("d"))
    assert sorted(chunk for _, chunk in sent) == [c for c in range(chunks) if book.owners[c] != key(1)]
    assert all(book.owners[chunk] == owner for owner, chunk in sent)


def test_an_auxiliary_sends_no_parts_and_is_complete_when_all_its_chunks_are_reduced() -> None:
    group = (member(1), member(2, Role.AUXILIARY), member(3))
    book = book_of(2, begin_of(group, chunks=6))
    assert book.next_parts() == []
    assert book.awaited == {}
    fill(book, 2, 1, 3)
    assert book.is_ready(2)
    book.reduced(2)
    assert not book.complete
    fill(book, 3, 1, 3)
    book.reduced(3)
    assert book.complete
    assert book.root() == b""
    assert not book_of(1, begin_of(group, chunks=6)).is_ready(0)


def test_who_missed_the_round_only_receives() -> None:
    book = book_of(9, begin_of(members(1, 2)))
    assert book.weights[key(9)] == 0.0
    assert book.receives[key(9)]
    assert len(book.missing) == 8
    assert book.parts == {}


# -- parts in


def test_a_chunk_is_ready_when_every_live_member_has_sent_its_part(book: Book) -> None:
    fill(book, 2, 1, 3)
    assert not book.is_ready(2)
    assert book.waiting_for() == dict.fromkeys(keys(1, 3, 4))  # of chunk 3 all are missing
    fill(book, 2, 4)
    assert book.is_ready(2)
    book.reduced(2)
    assert not book.is_ready(2), "it would be reduced twice"


@pytest.mark.parametrize(
    ("sender", "chunk", "reason"),
    [
        (9, 2, "it is not a member of the round"),
        (1, 8, "a part of chunk 8; the round has 8"),
        (1, 16383, "the round has 8"),
        (1, 4, "chunk 4 is not mine to reduce"),
        (5, 2, "an auxiliary member contributes nothing"),
        (3, 2, "chunk 2 came twice"),
    ],
)
def test_a_part_that_does_not_belong_here_is_refused(sender: int, chunk: int, reason: str) -> None:
    group: tuple[Member, ...] = (*members(1, 2, 3, 4), member(5, Role.AUXILIARY, bandwidth=0.0))
    book = book_of(2, begin_of(group, weights=(1.0, 1.0, 1.0, 0.0, 0.0)))
    assert book.part_arrived(key(3), 2, PLAN, 1.0)
    with pytest.raises(RuleBroken, match=reason):
        book.part_arrived(key(sender), chunk, PLAN, 1.0)
    assert book.parts == {2: {key(3): None}, 3: {}}, "what was refused was counted"


def test_a_member_weighs_what_its_first_part_says_and_no_other() -> None:
    book = book_of(2, begin_of(members(1, 2, 3, 4)))
    assert book.part_arrived(key(3), 2, PLAN, 7.5)
    assert book.weights[key(3)] == 7.5
    with pytest.raises(RuleBroken, match="chunk 3 weighs 8, and"):
        book.part_arrived(key(3), 3, PLAN, 8.0)


def test_a_member_of_weight_zero_asks_with_an_empty_part(book: Book) -> None:
    book = book_of(2, begin_of(members(1, 2, 3, 4), weights=(1.0, 1.0, 1.0, 0.0)))
    fill(book, 2, 1, 3)
    assert not book.is_ready(2)
    assert book.part_arrived(key(4), 2, PLAN, 0.0)
    assert book.is_ready(2)


# -- results


def test_a_result_is_wanted_once_and_only_from_the_owner(book: Book) -> None:
    with pytest.raises(RuleBroken, match="a result of chunk 0, which is not its to reduce"):
        book.result_arrived(key(3), 0, PLAN)
    with pytest.raises(RuleBroken, match="a result of chunk 2, which is not its to reduce"):
        book.result_arrived(key(3), 2, PLAN)  # it is mine
    with pytest.raises(RuleBroken, match="a result of chunk 8; the round has 8"):
        book.result_arrived(key(3), 8, PLAN)
    with pytest.raises(RuleBroken, match="not its to reduce"):
        book.result_arrived(key(9), 0, PLAN)
    assert book.result_arrived(key(1), 0, PLAN)
    book.received(0, digest("a"))
    assert not book.result_arrived(key(1), 0, PLAN)
    assert len(book.missing) == 7


def test_when_all_is_there_the_root_is_the_hash_of_all_digests(book: Book) -> None:
    letters = "abcdefgh"
    for chunk, letter in enumerate(letters):
        assert not book.complete
        book.received(chunk, digest(letter))
    assert book.complete
    assert book.root() == root_of(digest(letter) for letter in letters)
    assert book.root() != root_of(digest(letter) for letter in "abcdefhg")
    assert book.awaited == {}


# -- somebody leaves


def test_a_dead_senders_missing_parts_are_not_waited_for(book: Book) -> None:
    fill(book, 2, 1, 3)
    fill(book, 3, 1, 3, 4)
    book.reduced(3)
    assert book.put_out([key(4)]) == [2]
    assert book.waiting_for() == {}
    assert book.is_ready(2)


def test_nothing_more_is_sent_to_a_member_that_is_out(book: Book) -> None:
    book.put_out([key(1)])
    assert all(owner != key(1) for owner, _ in book.next_parts())


def test_a_dead_reducers_chunks_are_fetched_or_reduced_again(book: Book) -> None:
    book.next_parts()
    book.received(6, digest("g"))  # member 4 brought one of its two, and died
    book.put_out([key(4)])
    sources = (Source(6, key(3), digest("g")), Source(7, key(1), b""))
    fetches, ready = book.repair(Repair(book.begin.round, LATER, sources))
    assert fetches == [], "it has that chunk already"
    assert ready == []
    assert book.next_parts() == [(key(1), 7)], "the part goes to the new reducer"
    assert set(book.awaited.values()) == set(keys(1, 3))
    assert book.result_arrived(key(1), 7, LATER)


def test_a_survivor_that_lacks_what_others_hold_fetches_it(book: Book) -> None:
    source = Source(6, key(3), digest("g"))
    fetches, _ = book.repair(Repair(book.begin.round, LATER, (source,)))
    assert fetches == [source]
    book.received(6, digest("g"))
    assert book.repair(Repair(book.begin.round, LATER, (source,))) == ([], [])


def test_of_two_versions_of_a_chunk_the_one_that_the_repair_names_counts(book: Book) -> None:
    book.received(6, digest("x"))
    missing = len(book.missing)
    source = Source(6, key(3), digest("g"))
    assert book.repair(Repair(book.begin.round, LATER, (source,)))[0] == [source]
    assert len(book.missing) == missing + 1
    assert not book.digests[6]


def test_a_new_reducer_collects_the_parts_again(book: Book) -> None:
    fill(book, 2, 1, 3, 4)
    book.put_out([key(4)])
    _, ready = book.repair(Repair(book.begin.round, LATER, (Source(7, key(2), b""),)))
    assert 7 not in ready
    assert book.part_arrived(key(1), 7, book.plan, 1.0)
    assert not book.is_ready(7)
    assert book.part_arrived(key(3), 7, book.plan, 1.0)
    assert book.is_ready(7)
    assert 7 not in [chunk for _, chunk in book.next_parts()], "a part of it is not sent to itself"


def test_what_was_on_its_way_when_a_chunk_changed_hands_is_no_fault(book: Book) -> None:
    before = book.plan
    book.repair(Repair(book.begin.round, LATER, (Source(7, key(1), b""), Source(6, key(2), b""))))
    assert not book.result_arrived(key(4), 7, before)
    assert not book.part_arrived(key(1), 0, before, 1.0)
    for wrong in (
        lambda: book.result_arrived(key(4), 7, book.plan),
        lambda: book.part_arrived(key(1), 0, book.plan, 1.0),
    ):
        with pytest.raises(RuleBroken):
            wrong()


def test_a_repair_that_comes_twice_changes_nothing_more(book: Book) -> None:
    fill(book, 2, 1, 3, 4)
    book.put_out([key(4)])
    repair = Repair(book.begin.round, LATER, (Source(7, key(2), b""), Source(6, key(1), b"")))
    book.repair(repair)
    assert book.part_arrived(key(1), 7, book.plan, 1.0)
    book.repair(repair)
    assert list(book.parts[7]) == [key(1)]
    assert [chunk for _, chunk in book.next_parts()].count(6) == 1
