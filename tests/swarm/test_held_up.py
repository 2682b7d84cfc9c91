"""Members that hold rounds up, again and again: they are waited for less, and then for a while not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.book import Book
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.doubts import DECIDE_SLACK_SECONDS, MOST_ENDED
from shoal.swarm.protocol.gathering import REMINDER_SECONDS, Gathering
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.leading import Leading, Phase
from shoal.swarm.protocol.messages import Abort, Broken, Commit, Doubt, Elsewhere, Survey
from shoal.swarm.protocol.patience import FORGIVEN_SECONDS, LONGEST_PAUSE, SHORTEST_SECONDS, Patience
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from tests.swarm.rounds import RULES, begin_of, begun, chunks_of, key, keys, member, members, signer
from tests.swarm.test_coordinator import ROOT, gathering, join, running, the
from tests.swarm.test_lead import join as join_lead
from tests.swarm.test_lead import peer_of
from tests.swarm.test_one_liar import commit_by, peer_2
from tests.swarm.wire import Digests


def test_each_time_halves_how_long_it_is_waited_for() -> None:
    patience = Patience()
    waits = []
    for _ in range(5):
        waits.append(patience.of(key(2), 15.0, 0.0))
        patience.held_up(key(2), 0.0)
        patience.held_up(key(2), 0.0)  # once at a tip counts
        patience.new_tip()
    assert waits == [15.0, 7.5, 3.75, SHORTEST_SECONDS, SHORTEST_SECONDS]
    assert patience.of(key(3), 15.0, 0.0) == 15.0


def put_out(patience: Patience, member: bytes, coordinator: bytes, now: float, *, led: bool = False) -> None:
    """A round was committed without that member, which answers."""
    patience.put_out(member, coordinator, now, led=led)
    patience.new_tip()


def test_who_keeps_up_is_waited_for_again() -> None:
    patience = Patience()
    put_out(patience, key(2), key(1), 0.0, led=True)
    assert patience.of(key(2), 16.0, 0.0) == 8.0
    assert 8.0 < patience.of(key(2), 16.0, FORGIVEN_SECONDS / 2) < 16.0
    assert patience.of(key(2), 16.0, FORGIVEN_SECONDS) == 16.0


def test_no_short_time_is_made_longer() -> None:
    patience = Patience()
    patience.held_up(key(2), 0.0)
    assert patience.of(key(2), 0.5, 0.0) == 0.5


def test_good_rounds_in_between_do_not_make_up_for_those_that_it_holds_up() -> None:
    """Eight good ones of a second, and one that it holds up for as long as it is waited for: it costs a small share."""
    patience, now, lost = Patience(), 0.0, 0.0
    while now < 3600.0:
        now += 8.0
        if not patience.is_over(key(2), now):
            lost += (wait := patience.of(key(2), 10.0, now))
            now += wait
            put_out(patience, key(2), key(1), now, led=True)
    assert lost < 0.1 * now
    assert not patience.is_over(key(2), now + LONGEST_PAUSE)


def test_a_round_begins_without_who_held_up_too_many_if_the_others_are_enough() -> None:
    patience = Patience()
    for _ in range(3):
        put_out(patience, key(3), key(1), 0.0, led=True)
    rules = replace(RULES, target_samples=1e9)
    coordinator = gathering(1, 2, 3, rules=rules, veterans=frozenset(keys(1, 2, 3)), patience=patience)
    for number in (1, 2, 3):
        join(coordinator, number, now=1.0)
    assert coordinator.begin is not None
    assert [member.key for member in coordinator.begin.members] == sorted(keys(1, 2))
    assert key(3) in begun(coordinator, 1.0).late, "it hears how the round ends"


def test_who_is_never_done_is_put_out_once_this_peer_is() -> None:
    coordinator = running(1, 2, 3)
    coordinator.got_on_at = 100.0
    assert coordinator.hurry(lambda _: 12.0, 200.0) == [], "this peer lacks something itself"
    for number in (1, 2):
        coordinator.done[key(number)] = ROOT
    assert coordinator.hurry(lambda _: 12.0, 111.0) == []
    actions = coordinator.hurry(lambda _: 12.0, 113.0)
    assert the(actions, Abort) is not None
    assert the(actions, Survey) is not None
    assert coordinator.live() == sorted(keys(1, 2))
    assert coordinator.phase is Phase.SURVEYING


def test_who_held_up_too_many_is_doubted_as_the_next_coordinator_at_once() -> None:
    peer = peer_2(replace(RULES, target_samples=30.0))  # this tip is 4's to coordinate
    patience = peer.participant.silence.patience
    for now in (0.0, 1.0):
        put_out(patience, key(4), key(2), now, led=True)
    peer.look(lambda key: 0, 2.0)
    assert [type(send.message) for send in peer.out if isinstance(send, Send)] == [Doubt]
    assert key(4) in peer.participant.at.doubted


def test_where_no_samples_are_counted_nobody_is_kept_out_or_doubted_for_that() -> None:
    peer = peer_2()
    for now in (0.0, 1.0):
        put_out(peer.participant.silence.patience, key(4), key(2), now, led=True)
    peer.look(lambda key: 0, 2.0)
    assert not peer.participant.at.doubted


def counting_peer(rules: Rules = RULES) -> Peer:
    """A peer of a run that counts samples, with an input; this tip is 4's to coordinate."""
    peer = peer_2(replace(rules, target_samples=30.0))
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(key(2), begin, chunks_of(begin)), send))
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    return peer


def begin_and_end(peer: Peer, attempt: int, now: float, lasts: float) -> None:
    """The coordinator begins a round, and ends it."""
    begin = begin_of(members(2, 3, 4), coordinator=4, attempt=attempt)
    peer.receive(key(4), begin, [], now)
    peer.receive(key(4), Abort(begin.round, "not yet"), [], now + lasts)
    peer.participant.given.error = None
    peer.participant.next_step(now + lasts)


def test_who_ends_each_of_its_rounds_is_doubted_after_a_few() -> None:
    peer = counting_peer()
    for attempt in range(1, MOST_ENDED + 1):
        assert not peer.participant.at.doubted
        begin_and_end(peer, attempt, now=0.01 * attempt, lasts=0.005)
    assert set(peer.participant.at.doubted) == {key(4)}


def test_a_coordinator_has_no_more_time_for_two_rounds_than_for_one() -> None:
    peer = counting_peer()
    limit = peer.participant.silence.reducer_timeout + DECIDE_SLACK_SECONDS
    begin_and_end(peer, 1, now=0.0, lasts=limit - 5.0)
    peer.receive(key(4), begin_of(members(2, 3, 4), coordinator=4, attempt=2), [], limit - 4.0)
    peer.look(lambda key: 0, limit - 1.0)
    assert not peer.participant.at.doubted
    peer.look(lambda key: 0, limit + 1.0)
    assert set(peer.participant.at.doubted) == {key(4)}


def test_a_coordinator_owes_nothing_while_too_few_are_here() -> None:
    """It waits for them as all do."""
    peer = counting_peer(replace(RULES, min_group=4))
    limit = peer.participant.silence.reducer_timeout + DECIDE_SLACK_SECONDS
    begin_and_end(peer, 1, now=0.0, lasts=1.0)
    for now in range(2, int(limit) + 10):
        peer.look(lambda key: 0, float(now))
    assert not peer.participant.at.doubted


def test_who_has_signed_a_void_commit_is_doubted_at_once() -> None:
    peer = counting_peer()
    peer.receive(key(3), commit_by(4), [], 0.0)
    peer.out.clear()
    peer.give_up_missed(1.0)
    assert set(peer.participant.at.doubted) == {key(4)}
    assert [send.to for send in peer.out if isinstance(send, Send) and isinstance(send.message, Doubt)] == [keys(3)]


def test_nobody_waits_for_the_state_that_an_auxiliary_peer_names() -> None:
    """It has none: who resigned for it, and was joined again, was told of it again."""
    peer = peer_of(1, 2, 3)
    join_lead(peer, 2)
    lead = peer.lead
    assert isinstance(lead, Gathering)
    peer.keeps_state = True
    peer.view.returned(member(4, Role.AUXILIARY))
    later = Tip(lead.at.tip.epoch + 1, bytes(32), 1e9)
    peer.told(key(4), later, 0.0)
    assert peer.lead is lead
    peer.told(key(3), later, 0.0)
    assert peer.lead is not lead


def test_one_coordinator_alone_has_nobody_kept_out() -> None:
    patience = Patience()
    for epoch in range(10):
        put_out(patience, key(2), key(9), float(epoch))
    assert patience.of(key(2), 15.0, 10.0) == 15.0
    assert not patience.is_over(key(2), 10.0)
    for now in (10.0, 11.0):
        put_out(patience, key(2), key(8), now)
    assert patience.is_over(key(2), 11.0)


def begins_after(history: History, now: float) -> float:
    """Seconds until BEGIN, where 3 was in the last round and does not join this one."""
    rules = replace(RULES, target_samples=1e9, matchmaking_time=16.0)
    lead = gathering(1, 2, 3, rules=rules, veterans=frozenset(keys(1, 2, 3)), history=history)
    for number in (1, 2):
        join(lead, number, now=now, patience=16.0)
    at: float | None = now
    while lead.begin is None:
        at = lead.wake_at()
        assert at is not None
        lead.tick(at)
    history.punctuality.new_tip()
    return at - now


def test_who_is_waited_for_in_vain_is_waited_for_less_the_next_time() -> None:
    history = History()
    waits = [begins_after(history, now) - REMINDER_SECONDS for now in (0.0, 17.0, 26.0, 32.0, 36.0)]
    assert waits[0] == 16.0
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 2 * SHORTEST_SECONDS
    later = begins_after(history, 36.0 + 5 * FORGIVEN_SECONDS) - REMINDER_SECONDS
    assert later == 16.0


def test_who_joins_every_second_epoch_does_not_have_the_others_wait_for_all_that_time() -> None:
    history, now, lost = History(), 0.0, 0.0
    for _ in range(100):
        lost += (wait := begins_after(history, now))
        now += wait + 20.0  # until the next epoch without it: it is good in the one between
    assert lost < 0.25 * now


def test_who_joins_in_time_is_in_the_round_however_often_it_was_waited_for_in_vain() -> None:
    history = History()
    for now in (0.0, 17.0, 26.0):
        begins_after(history, now)
    rules = replace(RULES, target_samples=1e9)
    lead = gathering(1, 2, 3, rules=rules, veterans=frozenset(keys(1, 2, 3)), history=history)
    for number in (1, 2, 3):
        join(lead, number, now=40.0)
    assert lead.begin is not None
    assert key(3) in [member.key for member in lead.begin.members]


def after_elsewhere(begun_by: int, committed_by: int = 1) -> Patience:
    """3 ends the round of 1: it shows the BEGIN of another. Then a round is committed."""
    peer = peer_of(1, 2, 3)
    run_id = peer.view.run_id
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(key(1), begin, chunks_of(begin)), send))
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    for number in (1, 2, 3):
        join_lead(peer, number)
    lead = peer.lead
    assert isinstance(lead, Leading)
    begin = lead.begin
    peer.receive(key(1), begin, [], 0.0)
    other = signer(begun_by, run_id).sign(begin_of(members(1, 2, 3), coordinator=begun_by, tip=peer.tip))
    peer.receive(key(3), Elsewhere(member(begun_by), other), [], 0.0)
    assert (peer.lead, lead.phase) == (None, Phase.ABORTED)
    commit = Commit(peer.tip, begin.round, bytes(32), 3.0, keys(1, 2, 3), members(1, 2, 3), key(committed_by))
    peer.receive(key(committed_by), signer(committed_by, run_id).sign(commit), [], 0.0)
    assert peer.tip.epoch == 1
    return peer.participant.silence.patience


def test_who_ends_a_round_for_one_of_its_own_of_which_nothing_comes_has_held_it_up() -> None:
    assert after_elsewhere(begun_by=3).of(key(3), 16.0, 0.0) == 8.0


@pytest.mark.parametrize(("begun_by", "committed_by"), [(2, 1), (3, 3), (3, 2)])
def test_who_was_in_the_round_of_another_or_right_has_held_up_nothing(begun_by: int, committed_by: int) -> None:
    patience = after_elsewhere(begun_by, committed_by)
    assert [patience.of(one, 16.0, 0.0) for one in keys(2, 3)] == [16.0, 16.0]


def test_who_waits_for_a_third_that_it_has_complained_of_is_not_put_out_for_it() -> None:
    """The coordinator lacks a result of 2, which lacks a part of 3, and has said so."""
    coordinator = running(1, 2, 3, 4)
    assert coordinator.begin is not None
    silent = {number: Broken(coordinator.begin.round, key(number), False, "nothing came from it") for number in (2, 3)}
    coordinator.broken(key(2), silent[3], True, 2.0)
    assert coordinator.broken(key(1), silent[2], True, 3.9) == []
    assert not coordinator.out
    coordinator.tick(4.0)
    assert coordinator.parted == {frozenset(keys(2, 3)): key(3)}
    coordinator.broken(key(1), silent[2], True, 9.0)  # it has been judged, and holds the round up all the same
    assert set(coordinator.out) == {key(2)}
