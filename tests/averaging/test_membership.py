"""Who a peer thinks is in the run, and who coordinates: alike for peers that know alike, and bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.member import MAX_MEMBERS, Member, Role
from shoal.swarm.protocol.membership import Membership
from tests.averaging.rounds import key, member, members

ME = member(0)


def known(*numbers: int, run_id: str = "run", me: Member = ME) -> Membership:
    membership = Membership(run_id, me)
    membership.learn(members(*numbers))
    return membership


def many(count: int) -> list[Member]:
    return [Member(number.to_bytes(32, "big"), (), Role.CLIENT) for number in range(1, count + 1)]


def test_what_is_learned_is_told_once() -> None:
    membership = known(1)
    assert membership.learn(members(0, 1, 2, 2)) == [member(2)]
    assert membership.snapshot() == members(0, 1, 2)


def test_a_lost_member_comes_back_only_by_its_own_word() -> None:
    membership = known(1, 2)
    assert membership.lose(key(1))
    assert not membership.lose(key(1))
    assert membership.learn(members(1, 2)) == []
    assert membership.fix(members(0, 1, 2)) == []
    assert membership.snapshot() == members(0, 2)
    assert membership.returned(member(1))
    assert not membership.returned(member(1)), "it is known: no news"
    assert membership.snapshot() == members(0, 1, 2)
    assert membership.lose(key(2))
    assert membership.learn(members(1)) == []


def test_a_member_may_change_what_it_says_of_itself_and_others_may_not() -> None:
    membership = known(1)
    moved = Member(key(1), ("/ip4/10.9.9.9/tcp/1",), Role.NODE, 7.0)
    assert membership.learn([moved]) == []
    assert membership.members[key(1)] == member(1)
    assert membership.returned(moved)
    assert membership.members[key(1)] == moved


def test_a_peer_neither_loses_nor_replaces_itself() -> None:
    membership = known(1)
    assert not membership.lose(ME.key)
    membership.returned(Member(ME.key, (), Role.CLIENT))
    assert membership.members[ME.key] == ME


def test_a_commit_adds_its_view_and_takes_nobody_away() -> None:
    membership = known(1, 2)
    assert membership.fix(members(0, 2, 3)) == [member(3)]
    assert membership.snapshot() == members(0, 1, 2, 3)


def test_nobody_can_make_it_know_more_than_its_bound() -> None:
    crowd = many(MAX_MEMBERS + 50)
    membership = Membership("run", ME)
    assert len(membership.learn(crowd)) == MAX_MEMBERS - 1
    assert membership.returned(member(200))
    assert len(membership.members) == MAX_MEMBERS
    for one in crowd:
        membership.lose(one.key)
    assert len(membership.lost) == MAX_MEMBERS
    assert crowd[-1].key in membership.lost
    assert crowd[0].key not in membership.lost, "the oldest loss is forgotten first"


# -- candidates


@given(st.sets(st.integers(1, 200), max_size=12), st.integers(0, 50), st.randoms(use_true_random=False))
def test_peers_that_know_alike_agree_on_the_order(numbers: set[int], epoch: int, rng: random.Random) -> None:
    order = [0, *numbers]
    rng.shuffle(order)
    mine, other = known(*numbers), known(*order, me=member(order[0]))
    assert mine.candidates(epoch) == other.candidates(epoch)
    assert set(mine.candidates(epoch)) == set(members(0, *numbers))
    assert mine.fingerprint() == other.fingerprint()


def test_the_work_goes_round() -> None:
    membership = known(1, 2, 3)
    first = [membership.candidates(epoch)[0] for epoch in range(40)]
    assert set(first) == set(members(0, 1, 2, 3))
    assert max(first.count(m) for m in set(first)) < 20
    assert first != [known(1, 2, 3, run_id="other").candidates(epoch)[0] for epoch in range(40)]


def test_of_unequal_views_the_larger_keeps_the_order_of_the_smaller() -> None:
    """Who does not know a member skips it: two views differ in who is first only if the first is unknown to one."""
    for epoch in range(20):
        large = known(1, 2, 3, 4).candidates(epoch)
        small = known(2, 4).candidates(epoch)
        assert small == [m for m in large if m in members(0, 2, 4)]


def test_clients_do_not_coordinate_but_for_want_of_anybody() -> None:
    membership = known(1)
    membership.learn([member(2, Role.CLIENT), member(3, Role.AUXILIARY)])
    for epoch in range(10):
        assert set(membership.candidates(epoch)) == {ME, member(1), member(3, Role.AUXILIARY)}
    client = member(4, Role.CLIENT)
    assert Membership("run", client).candidates(0) == [client]
    assert known(1, me=client).candidates(0) == [member(1)]


def test_a_member_that_is_behind_does_not_coordinate_until_it_has_caught_up() -> None:
    membership = known(1, 2)
    assert membership.told(key(1), behind=True)
    assert not membership.told(key(1), behind=True)
    assert member(1) not in membership.candidates(3)
    assert member(1) in membership.snapshot(), "it is a member all the same"
    assert membership.told(key(1), behind=False)
    assert not membership.told(key(1), behind=False)
    assert member(1) in membership.candidates(3)
    membership.told(key(2), behind=True)
    membership.lose(key(2))
    membership.returned(member(2))
    assert member(2) in membership.candidates(3), "what was known of it before it was lost is forgotten"


@pytest.mark.parametrize("other", [(1, 2), (1, 2, 3, 4), (1, 2, 4)])
def test_a_fingerprint_differs_when_the_members_do(other: tuple[int, ...]) -> None:
    assert known(1, 2, 3).fingerprint() == known(3, 1, 2).fingerprint()
    assert known(1, 2, 3).fingerprint() != known(*other).fingerprint()
