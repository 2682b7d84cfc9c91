"""A peer that coordinates: which JOINs it refuses, how it judges complaints, and that it ignores late answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.p2p.errors import Refused
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.book import Book
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.gathering import Gathering, Until
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.leading import NOTICE_SECONDS, Leading, Phase
from shoal.swarm.protocol.messages import Broken, Hello, Join, Progress, Survey
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.view import Role, View
from tests.swarm.rounds import (
    RULES,
    TERMS,
    TIP,
    at_tip,
    chunks_of,
    digest,
    have_of,
    join_of,
    key,
    keys,
    member,
    members,
    signer,
)
from tests.swarm.wire import Digests


def peer_of(*numbers: int) -> Peer:
    """Peer 1, which knows and reaches all of these, in a run whose first coordinator it is."""
    for number in range(1000):
        view, own = View(f"run {number}", member(1), lambda key: True), signer(1, f"run {number}")
        peer = Peer(view, TERMS, RULES, Silence(15.0, 30.0), own, keeps_state=False)
        peer.view.learn(members(*numbers))
        if peer.participant.coordinator() == member(1):
            return peer
    raise AssertionError("it is never its turn")


def join(peer: Peer, number: int, gathered: bytes = b"") -> None:
    message = join_of(member(number), tip=peer.tip)
    peer.expect_join(key(number), message)
    peer.receive(key(number), message, [memoryview(gathered)], 0.0)


def leading(*numbers: int) -> tuple[Peer, Leading]:
    """Peer 1 leads; all of these have joined, and the round has begun."""
    peer = peer_of(*numbers)
    for number in numbers:
        join(peer, number)
    assert isinstance(peer.lead, Leading)
    peer.out.clear()
    return peer, peer.lead


def gathers(peer: Peer) -> Gathering:
    """How it gathers the members of a round."""
    assert isinstance(peer.lead, Gathering)
    return peer.lead


def told(peer: Peer, kind: type) -> list[bytes]:
    """Who is sent, or asked, such a message."""
    found: list[bytes] = []
    for action in peer.out:
        if isinstance(action, Send | Ask) and isinstance(action.message, kind):
            found += action.to
    return found


def complain(peer: Peer, lead: Leading, number: int, of: bytes, now: float = 0.0) -> None:
    assert lead.begin is not None
    broken = Broken(lead.begin.round, of, False, "the connection to it was lost")
    peer.receive(key(number), broken, [], now)


@pytest.mark.parametrize("garbage", [b"\xc1", b"\xa1\xff", b"\x91" * 60_000, b"\x01\x02"])
def test_garbage_that_a_member_would_have_others_read_is_refused(garbage: bytes) -> None:
    peer = peer_of(1, 2)
    peer._coordinating(0.0)
    with pytest.raises(Refused, match="not plain data"):
        join(peer, 2, garbage)
    assert not gathers(peer).joins


def test_two_that_do_not_reach_each_other_are_parted_once() -> None:
    peer, lead = leading(1, 2, 3)
    for _ in range(100):
        complain(peer, lead, 2, key(3))
        complain(peer, lead, 2, key(77))  # a stranger
    for _ in range(4):
        while (at := peer.wake_at()) is not None and at < 10.0:
            peer.tick(at)
    assert not lead.out
    assert set(lead.parted) == {frozenset(keys(2, 3))}
    assert len(told(peer, Survey)) == 3, "one, to all three"


def test_who_complains_of_several_is_out() -> None:
    peer, lead = leading(1, 2, 3, 4)
    complain(peer, lead, 2, key(3))
    complain(peer, lead, 2, key(4))
    while (at := peer.wake_at()) is not None and at < 10.0:
        peer.tick(at)
    assert set(lead.out) == {key(2)}


def test_nobody_is_judged_before_all_have_noticed_a_loss() -> None:
    peer, lead = leading(1, 2, 3)
    complain(peer, lead, 2, key(3))
    assert not lead.out
    assert peer.wake_at() == NOTICE_SECONDS
    peer.view.lose(key(3))
    peer.members_changed(0.1)  # reached still, so nothing follows from it
    assert not lead.out


def test_only_members_of_a_round_can_complain() -> None:
    peer, lead = leading(1, 2, 3)
    with pytest.raises(Refused, match="only a member of the round"):
        complain(peer, lead, 9, key(3))


@pytest.mark.parametrize("late", [have_of, lambda ballot: None])
def test_an_answer_that_comes_after_the_round_is_ignored(late: Any) -> None:
    peer, lead = leading(1, 2, 3)
    peer.out.extend(lead.start_survey(0.0))
    survey = next(action.message for action in peer.out if isinstance(action, Ask))
    assert isinstance(survey, Survey)
    peer.out.extend(lead.abort("it is over"))
    before = len(peer.out)
    answer = late(survey.ballot)
    peer.answered(key(2), survey, answer or TimeoutError("it is slow"), 1.0)
    peer._end_lead()
    peer.answered(key(3), survey, have_of(survey.ballot, out=keys(3)), 1.0)
    assert len(peer.out) == before
    assert lead.phase is Phase.ABORTED
    assert not lead.out


def own_join(peer: Peer, now: float) -> Join | None:
    """What peer 1, which has an input, sends to itself now."""
    peer.out.clear()
    peer.participant.next_step(now)
    asked = [action for action in peer.out if isinstance(action, Ask) and isinstance(action.message, Join)]
    assert all(action.to == keys(1) for action in asked)
    return asked[0].message if asked and isinstance(asked[0].message, Join) else None


def test_whoever_resigns_joins_again_itself() -> None:
    """Another member tells of a better state: the round that gathers here is given up. Nobody can send that state, and
    the next round begins with this peer as well."""
    peer = peer_of(1, 2, 3)
    better = peer.tip.after(digest("b"), 100.0)
    peer.participant.offer(
        Contribution(1.0, lambda begin, send, fault: Digests(Book(key(1), begin, chunks_of(begin)), send), tip=peer.tip)
    )
    mine = own_join(peer, 1.0)
    assert mine is not None
    peer.expect_join(key(1), mine)
    peer.receive(key(1), mine, [], 1.0)
    join(peer, 2)
    assert gathers(peer).phase is Until.BEGIN
    peer.told(key(3), better, 2.0)
    assert peer.lead is None
    peer.view.ignore(peer.tip, 2.0)
    assert own_join(peer, 2.0) is not None


def test_a_claim_that_is_ignored_ends_no_round() -> None:
    peer = peer_of(1, 2, 3)
    better = peer.tip.after(digest("b"), 100.0)
    peer.told(key(3), better, 0.0)
    peer.view.ignore(peer.tip, 0.0)
    join(peer, 2)
    peer.told(key(3), better, 2.0)
    assert gathers(peer).phase is Until.BEGIN


def test_a_join_of_a_peer_that_is_lost_before_its_tip_comes_is_void() -> None:
    peer = peer_of(1, 2, 3)
    message = join_of(member(2), tip=peer.tip)
    peer.expect_join(key(2), message)
    peer.lost(key(2), peer.view.lose(key(2)), 0.0)
    assert isinstance(peer.receive(key(2), message, [], 0.0), Hello), "should it live, it must not wait in vain"
    assert peer.lead is None


def test_a_join_that_is_never_heard_goes_with_its_sender() -> None:
    """As one whose sender waits for its answer for less time than its tip is waited for."""
    peer = peer_of(1, 2)
    peer.expect_join(key(2), join_of(member(2), tip=peer.tip))
    peer.lost(key(2), True, 0.0)
    assert not peer._joining


def test_a_late_report_of_this_peer_to_itself_does_not_end_its_being_a_candidate() -> None:
    """It was under way when this peer went on alone. The others take it for a candidate, so it must do that, too."""
    peer = peer_of(1, 2)
    report = Progress(peer.tip, 1.0, 1.0)
    peer.move(peer.tip.after(digest("a"), 1.0), 0.0, made=True)
    peer.receive(key(1), report, [], 0.0)
    assert member(1) in peer.view.candidates(peer.tip)


def test_a_late_report_of_this_peer_to_itself_is_no_better_state() -> None:
    """It was under way when this peer went back to an older state."""
    peer = peer_of(1, 2)
    old = peer.tip
    peer.move(old.after(digest("a"), 1.0), 0.0, made=True)
    report = Progress(peer.tip, 1.0, 1.0)
    peer.move(old, 0.0)
    peer.receive(key(1), report, [], 0.0)
    assert peer.participant.behind(0.0) is None


def test_who_reports_and_never_joins_is_waited_for_ever_more_seldom() -> None:
    """It may be slow only: then it is in the round that waits for it."""
    rules = replace(RULES, target_samples=10.0)
    history = History()
    for epoch in range(17):
        lead = Gathering(key(1), at_tip(), rules, signer(1), history)
        lead.expect(members(1, 2, 3), 0.0)
        for number, samples in ((3, 5.0), (1, 5.0), (2, 5.0)):
            lead.progress(key(number), Progress(TIP, samples, 1.0), 0.0)
        for number in (1, 2):
            lead.join(key(number), join_of(member(number)), b"", 0.0)
        assert (lead.begin is None) is (epoch in (0, 2, 4, 8, 16))
        lead.tick(rules.matchmaking_time)
        lead.tick(rules.matchmaking_time + 1.0)
        assert lead.begin is not None
    history.committed({key(3): 1.0}, 100.0)
    assert not history.absent, "it has joined a round"


def test_many_who_report_and_never_join_cost_a_tenth_of_the_time() -> None:
    """BEGIN waits for all that have reported while less than half of them have joined; these are made up."""
    rules = replace(RULES, target_samples=10.0, matchmaking_time=15.0)
    history, now, waited = History(), 0.0, 0.0
    while now < 2000.0:
        lead = Gathering(key(1), at_tip(), rules, signer(1), history)
        lead.expect([*members(1, 2), *(member(number, Role.CLIENT) for number in range(3, 7))], now)
        for number, samples in ((3, 0.1), (4, 0.1), (5, 0.1), (6, 0.1), (1, 5.0), (2, 5.0)):
            lead.progress(key(number), Progress(TIP, samples, 1.0), now)
        for number in (1, 2):
            lead.join(key(number), join_of(member(number)), b"", now)
        called = now
        while lead.begin is None:
            at = lead.wake_at()
            assert at is not None
            now = max(now, at)
            lead.tick(now)
        waited += now - called
        now += 1.0
    assert waited < 250.0
