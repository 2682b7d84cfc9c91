"""Who a peer thinks is in the run, and who coordinates: alike for peers that know alike, and bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import HEARSAY_SECONDS, MAX_HEARSAY, MAX_MEMBERS, Member, Reach, Role, View
from tests.swarm.rounds import TIP, key, keys, member, members

ME = member(0)


def known(*numbers: int, run_id: str = "run", me: Member = ME) -> View:
    view = View(run_id, me, lambda key: True)
    view.learn(members(*numbers))
    return view


def at(epoch: int) -> Tip:
    """A state of that epoch."""
    return structs.replace(TIP, epoch=epoch)


def many(count: int) -> list[Member]:
    return [Member(number.to_bytes(32, "big"), (), Role.CLIENT) for number in range(1, count + 1)]


def test_what_is_learned_is_told_once() -> None:
    view = known(1)
    assert view.learn(members(0, 1, 2, 2)) == [member(2)]
    assert view.snapshot() == members(0, 1, 2)


def test_a_lost_member_comes_back_only_by_its_own_word() -> None:
    view = known(1, 2)
    assert view.lose(key(1))
    assert not view.lose(key(1))
    assert view.learn(members(1, 2)) == []
    assert view.learn(members(0, 1, 2)) == []
    assert view.snapshot() == members(0, 2)
    assert view.returned(member(1))
    assert not view.returned(member(1)), "it is known: no news"
    assert view.snapshot() == members(0, 1, 2)
    assert view.lose(key(2))
    assert view.learn(members(1)) == []


def test_a_member_may_change_what_it_says_of_itself_and_others_may_not() -> None:
    view = known(1)
    moved = Member(key(1), ("/ip4/10.9.9.9/tcp/1",), Role.NODE, 7.0)
    assert view.learn([moved]) == []
    assert view.members[key(1)] == member(1)
    assert view.returned(moved)
    assert view.members[key(1)] == moved


def test_a_peer_neither_loses_nor_replaces_itself() -> None:
    view = known(1)
    assert not view.lose(ME.key)
    view.returned(Member(ME.key, (), Role.CLIENT))
    assert view.members[ME.key] == ME


def test_a_commit_adds_its_view_and_takes_nobody_away() -> None:
    view = known(1, 2)
    assert view.learn(members(0, 2, 3)) == [member(3)]
    assert view.snapshot() == members(0, 1, 2, 3)


def test_nobody_can_make_it_know_more_than_its_bound() -> None:
    crowd = many(MAX_MEMBERS + 50)
    view = View("run", ME, lambda key: True)
    assert len(view.learn(crowd)) == MAX_MEMBERS - 1
    assert view.returned(member(200))
    assert len(view.members) == MAX_MEMBERS
    for one in crowd:
        view.lose(one.key)
    assert len(view.lost) == MAX_MEMBERS
    assert crowd[-1].key in view.lost
    assert crowd[0].key not in view.lost, "the oldest loss is forgotten first"


# -- candidates


@given(st.sets(st.integers(1, 200), max_size=12), st.integers(0, 50), st.randoms(use_true_random=False))
def test_peers_that_know_alike_agree_on_the_order(numbers: set[int], epoch: int, rng: random.Random) -> None:
    order = [0, *numbers]
    rng.shuffle(order)
    mine, other = known(*numbers), known(*order, me=member(order[0]))
    assert mine.candidates(at(epoch)) == other.candidates(at(epoch))
    assert set(mine.candidates(at(epoch))) == set(members(0, *numbers))
    assert mine.fingerprint() == other.fingerprint()


def test_the_work_goes_round() -> None:
    view = known(1, 2, 3)
    first = [view.candidates(at(epoch))[0] for epoch in range(40)]
    assert set(first) == set(members(0, 1, 2, 3))
    assert max(first.count(m) for m in set(first)) < 20
    assert first != [known(1, 2, 3, run_id="other").candidates(at(epoch))[0] for epoch in range(40)]


def test_of_unequal_views_the_larger_keeps_the_order_of_the_smaller() -> None:
    """Who does not know a member skips it: two views differ in who is first only if the first is unknown to one."""
    for epoch in range(20):
        large = known(1, 2, 3, 4).candidates(at(epoch))
        small = known(2, 4).candidates(at(epoch))
        assert small == [m for m in large if m in members(0, 2, 4)]


def test_clients_do_not_coordinate_but_for_want_of_anybody() -> None:
    view = known(1)
    view.learn([member(2, Role.CLIENT), member(3, Role.AUXILIARY)])
    for epoch in range(10):
        assert set(view.candidates(at(epoch))) == {ME, member(1), member(3, Role.AUXILIARY)}
    client = member(4, Role.CLIENT)
    assert View("run", client, lambda key: True).candidates(at(0)) == [client]
    assert known(1, me=client).candidates(at(0)) == [member(1)]


def relayed(number: int) -> Member:
    return structs.replace(member(number), reach=Reach.RELAYED)


def test_who_is_relayed_coordinates_if_nobody_else_can() -> None:
    view = View("run", relayed(0), lambda key: True)
    view.learn([member(1), relayed(2), member(3)])
    for epoch in range(40):
        order = view.candidates(at(epoch))
        assert {m.key for m in order[:2]} == set(keys(1, 3))
        without = known(0, 1, 2, 3).candidates(at(epoch))
        assert [m.key for m in order] == sorted((m.key for m in without), key=lambda key: key in keys(0, 2))
    view.lose(key(1))
    view.lose(key(3))
    assert {view.candidates(at(epoch))[0].key for epoch in range(40)} == set(keys(0, 2))


def test_a_member_says_that_it_is_reached_in_another_way() -> None:
    view = known(1, 2)
    view.say(relayed(0))
    assert view.returned(relayed(2))
    assert not view.returned(relayed(2))
    assert view.snapshot() == (relayed(0), member(1), relayed(2))
    assert view.candidates(at(3))[0] == member(1)
    view.say(member(0))
    assert view.me == member(0)


def test_who_listens_at_relays_only() -> None:
    circuit, direct = f"/ip4/10.0.0.9/tcp/4000/p2p/{member(3).peer}/p2p-circuit/p2p/{ME.peer}", ME.addresses[0]
    told = {(): False, (direct,): False, (circuit,): True, (circuit, direct): False, (circuit, circuit): True}
    for addresses, expected in told.items():
        assert structs.replace(ME, addresses=addresses).listens_at_relays is expected


def test_a_member_that_is_behind_does_not_coordinate_until_it_has_caught_up() -> None:
    view = known(1, 2)
    assert view.told(key(1), TIP, behind=True)
    assert not view.told(key(1), TIP, behind=True)
    assert member(1) not in view.candidates(at(3))
    assert member(1) in view.snapshot(), "it is a member all the same"
    assert view.told(key(1), TIP, behind=False)
    assert not view.told(key(1), TIP, behind=False)
    assert member(1) in view.candidates(at(3))
    view.told(key(2), TIP, behind=True)
    view.lose(key(2))
    view.returned(member(2))
    assert member(2) in view.candidates(at(3)), "what was known of it before it was lost is forgotten"


@pytest.mark.parametrize("other", [(1, 2), (1, 2, 3, 4), (1, 2, 4)])
def test_a_fingerprint_differs_when_the_members_do(other: tuple[int, ...]) -> None:
    assert known(1, 2, 3).fingerprint() == known(3, 1, 2).fingerprint()
    assert known(1, 2, 3).fingerprint() != known(*other).fingerprint()


# -- hearsay


def test_who_is_only_mentioned_is_no_member() -> None:
    view = known(2)
    before = view.fingerprint()
    assert view.hear(key(2), members(2, 3, 4), 0.0) == list(members(3, 4))
    assert view.hear(key(2), members(3, 4), 1.0) == [], "they are being met"
    assert view.fingerprint() == before
    assert {m.key for m in view.snapshot()} == {m.key for m in view.candidates(at(0))} == set(keys(0, 2))
    view.returned(member(3))
    assert key(3) in view.members


def test_one_teller_mentions_so_many_and_leaves_room_for_others() -> None:
    view, many = known(2), [Member(n.to_bytes(32), (), Role.CLIENT) for n in range(1000)]
    assert len(view.hear(key(2), many, 0.0)) == MAX_HEARSAY
    assert view.hear(key(2), members(9), 0.0) == []
    assert view.hear(key(3), members(9), 0.0) == list(members(9))
    assert len(view.members) == 2
    assert view.num_clients() == 0


def test_who_gives_no_sign_is_forgotten() -> None:
    view = known(2)
    view.hear(key(2), members(3, 4), 0.0)
    assert view.forget(HEARSAY_SECONDS - 1.0) == []
    view.listed(members(3), HEARSAY_SECONDS - 1.0)
    assert view.forget(HEARSAY_SECONDS) == [key(4)]
    assert view.is_known(key(3))
    assert not view.is_known(key(4))
    assert view.hear(key(2), members(4), 100.0) == list(members(4)), "others may mention it again"


def test_a_state_that_is_waited_for_long_in_vain_is_asked_for_less_often() -> None:
    """One that comes drop by drop costs minutes each time: at most a third of the time goes there in the end."""
    view, ahead = known(1, 2), Tip(9, bytes(32), 1e300)
    view.told(key(1), ahead, behind=False)
    now, waited = 0.0, 0.0
    while now < 20_000.0:
        if view.best(now) is not None:
            now += 270.0
            waited += 270.0
            view.ignore(TIP, now, 270.0)
        now += 1.0
    assert waited < 0.4 * now


def test_who_leaves_and_comes_back_with_a_state_that_nobody_could_send_is_ignored_as_before() -> None:
    """Each time would cost all trainers a step, and nothing would be left of their time."""
    view, ahead = known(1, 2), Tip(9, bytes(32), 1e300)
    asked, now = 0, 0.0
    while now < 300.0:
        if view.best(now) is not None:
            asked += 1
            view.ignore(TIP, now)
        view.lose(key(1))
        assert view.best(now) is None
        view.returned(member(1))
        view.told(key(1), ahead, behind=False)
        now += 0.5
    assert asked < 10
    view.told(key(2), ahead, behind=False)
    assert view.best(now) == ahead, "another one that says so is asked"


def test_who_claims_a_better_state_that_nobody_could_send_coordinates_nothing() -> None:
    """Its turns as coordinator would be lost, one after the other."""
    view = known(1, 2)
    better = TIP.after(bytes(32), 1e6)
    view.told(key(1), better, False)
    assert set(view.candidates(TIP)) == set(members(0, 1, 2)), "this peer downloads that state first"
    view.ignore(TIP, 0.0)
    assert set(view.candidates(TIP)) == set(members(0, 2))
    view.advanced(keys(1, 2), better, better.after(bytes(32), 1.0))
    view.told(key(1), TIP, False)
    assert set(view.candidates(TIP)) == set(members(0, 1, 2)), "it is at this state after all"


def test_who_loads_the_state_of_a_tip_is_no_candidate_there_until_it_is_at_it() -> None:
    view, here = known(1), at(1)
    other = key(1)
    assert not view.told(other, at(0), False), "it follows the commit that led here, as far as is known"
    assert view.loads(other, here)
    assert not view.loads(other, here)
    assert [member.key for member in view.candidates(here)] == [view.me.key]
    assert view.told(other, here, False)
    assert not view.loads(other, here), "it loads the same state once more"
    assert len(view.candidates(here)) == 2
