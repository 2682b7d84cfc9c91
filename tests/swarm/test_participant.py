"""What a member may follow: one round at a time, only higher ballots, only what its holder says; and split brains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from shoal.p2p.errors import Outrun
from shoal.swarm.protocol.book import Book, RuleBroken
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.lifetimes import AtTip, InRound
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.messages import Begin, Commit, Doubt, Elsewhere, Have, Repair, Source, Survey
from shoal.swarm.protocol.participant import MemberState, Participant
from shoal.swarm.protocol.redo import RedoLog
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.tip import MAX_LEAP, NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.view import Role, View
from tests.swarm.rounds import TERMS, TIP, begin_of, chunks_of, digest, key, keys, member, members, signer
from tests.swarm.wire import Digests

ME = key(2)
BEGIN = begin_of(members(1, 2, 3))


def follow(participant: Participant, begin: Begin, sender: bytes | None = None, *, relayed: bool = False) -> None:
    participant.at.asked[begin.ballot.coordinator] = None  # it has its JOIN
    participant.enter(sender or begin.ballot.coordinator, begin, [], 0.0, relayed=relayed)


def follow_survey(participant: Participant, sender: bytes, survey: Survey) -> None:
    """Raises RuleBroken if the survey was not followed: its sender is told of a higher ballot, or nothing."""
    answer = participant.on_survey(sender, survey, [], 0.0)
    assert isinstance(answer, Have)
    if answer.ballot != survey.ballot:
        raise RuleBroken(f"attempt {survey.ballot.number}, and this peer has followed {answer.ballot.number}")


def participant_at(tip: Tip, joined: bool = True) -> Participant:
    """Peer 2, which reaches all but peer 1, with an input that waits unless not `joined`."""
    view = View("run", member(2), lambda other: other != key(1))
    participant = Participant(view, tip, TERMS, [], Silence(15.0, 30.0), signer(2), RedoLog(0))
    if joined:
        participant.offer(
            Contribution(1.0, lambda begin, send, fault: Digests(Book(ME, begin, chunks_of(begin)), send))
        )
    return participant


def in_round(begin: Begin = BEGIN) -> Participant:
    participant = participant_at(begin.tip)
    follow(participant, begin)
    return participant


def traces(participant: Participant) -> tuple[Any, ...]:
    """All that following a message may change."""
    p = participant
    of_round = None if p.round is None else (p.round.begin, p.round.repair, p.round.done)
    return p.state, p.at.tip, p.at.ballot, of_round, p.at.commit, p.at.missed, p.at.called


def round_of(participant: Participant) -> InRound:
    """The round that it is in."""
    assert participant.round is not None
    return participant.round


def has_all(participant: Participant) -> None:
    """Every chunk is here."""
    participant.state, round_of(participant).done = MemberState.COMPLETE, participant.at.ballot


def survey_of(number: int, coordinator: int, begin: Begin = BEGIN, out: tuple[bytes, ...] = ()) -> Survey:
    survey = Survey(begin.tip, begin.round, Ballot(number, key(coordinator)), out, None)
    return signer(coordinator).sign(survey)


def repair_of(number: int, coordinator: int, sources: tuple[Source, ...] = (), begin: Begin = BEGIN) -> Repair:
    return signer(coordinator).sign(Repair(begin.round, Ballot(number, key(coordinator)), sources))


def commit_of(begin: Begin = BEGIN, root: bytes = digest("r")) -> Commit:
    return Commit(begin.tip, begin.round, root, 3.0, tuple(m.key for m in begin.members), begin.members)


# -- BEGIN


def test_a_round_that_it_has_joined_is_followed() -> None:
    participant = in_round()
    assert participant.begin is BEGIN
    assert participant.at.ballot == BEGIN.ballot
    assert participant.at.ballot.number == 1
    assert participant.state is MemberState.IN_ROUND


@pytest.mark.parametrize(
    ("changes", "how", "sender", "reason"),
    [
        ({"tip": TIP.after(digest("a"), 1.0)}, {}, 1, "BEGIN of epoch 1, and this peer is at another state"),
        ({"tip": Tip(0, digest("x"), 0.0)}, {}, 1, "at another state"),  # same epoch, another lineage
        ({}, {}, 3, "BEGIN under the ballot of another peer"),
        ({}, {"relayed": True}, 9, "BEGIN under the ballot of another peer"),
        ({}, {"joined": False}, 1, "BEGIN without a JOIN of this peer"),
        ({"members": members(1, 3, 4)}, {}, 1, "BEGIN without this peer"),
        ({"weights": (1.0, 1.0)}, {}, 1, "lists of unequal length"),
        ({"machines": ("",) * 4}, {}, 1, "lists of unequal length"),
        ({"states": ()}, {}, 1, "lists of unequal length"),
        ({"averages": (b"",)}, {}, 1, "lists of unequal length"),
        ({"members": members(1, 3, 2)}, {}, 1, "members out of order"),
        ({"members": members(1, 2, 2)}, {}, 1, "members out of order"),
        ({"starts": (0, 2, 4)}, {}, 1, "a plan that does not divide the chunks"),
        ({"starts": (1, 2, 4, 8)}, {}, 1, "a plan that does not divide the chunks"),
        ({"starts": (0, 5, 4, 8)}, {}, 1, "a plan that does not divide the chunks"),
        ({"starts": ()}, {}, 1, "a plan that does not divide the chunks"),
    ],
)
def test_a_begin_that_must_not_be_followed(
    changes: dict[str, Any], how: dict[str, bool], sender: int, reason: str
) -> None:
    participant = participant_at(TIP, joined=how.pop("joined", True))
    before = traces(participant)
    with pytest.raises(RuleBroken, match=reason):
        follow(participant, msgspec.structs.replace(BEGIN, **changes), key(sender), **how)
    assert traces(participant) == before, "what was refused has left a trace"


def test_a_begin_with_a_loss_is_followed_only_if_this_peer_has_given_one() -> None:
    loss = Loss(1.0, LossKind.FLOAT32)
    with_loss = msgspec.structs.replace(BEGIN, loss=loss)
    for own, weight, follows in ((None, 1.0, False), (None, 0.0, True), (loss, 1.0, True)):
        participant = participant_at(TIP)
        assert participant.given.input is not None
        participant.given.input = replace(participant.given.input, tip=TIP, weight=weight, loss=own)
        begin = msgspec.structs.replace(with_loss, weights=(1.0, weight, 1.0))
        if follows:
            follow(participant, begin)
            assert participant.begin is begin
        else:
            with pytest.raises(RuleBroken, match="BEGIN has a loss, and this peer has joined without one"):
                follow(participant, begin)
    participant = participant_at(TIP)
    assert participant.given.input is not None
    participant.given.input = replace(participant.given.input, tip=TIP, loss=loss)
    follow(participant, BEGIN)  # another peer gave none


def test_a_begin_that_is_only_late_says_so() -> None:
    """As nobody is at fault, its sender's log has no warning."""
    late = {
        "without a JOIN": (participant_at(TIP, joined=False), BEGIN),
        "at another state": (participant_at(TIP), msgspec.structs.replace(BEGIN, tip=TIP.after(digest("a"), 1.0))),
        "in a round already": (in_round(BEGIN), begin_of(members(2, 3, 4), attempt=5, coordinator=4)),
    }
    for reason, (participant, begin) in late.items():
        with pytest.raises(Outrun, match=reason):
            follow(participant, begin)
    for changes in ({"members": members(1, 3, 4)}, {"states": ()}):
        with pytest.raises(RuleBroken) as caught:
            follow(participant_at(TIP), msgspec.structs.replace(BEGIN, **changes))
        assert not isinstance(caught.value, Outrun)


def test_another_member_may_relay_the_begin_of_a_lost_coordinator() -> None:
    participant = participant_at(TIP)
    follow(participant, BEGIN, key(3), relayed=True)
    assert participant.begin is BEGIN


def test_of_two_coordinators_with_unequal_views_the_first_is_followed_and_the_other_refused() -> None:
    mine, other = BEGIN, begin_of(members(2, 3, 4), attempt=5, coordinator=4)
    participant = in_round(mine)
    with pytest.raises(RuleBroken, match="in a round already"):
        follow(participant, other)
    assert participant.begin is mine
    assert participant.at.ballot == mine.ballot


def test_rounds_that_only_begin_and_end_are_no_progress() -> None:
    """Otherwise a coordinator that begins round after round would keep a trainer for ever."""
    participant = participant_at(BEGIN.tip)
    for attempt in range(1, 4):
        follow(participant, begin_of(members(1, 2, 3), attempt=attempt))
        participant.leave()
    assert participant.progressed_at < 0.0


def test_a_higher_ballot_voids_the_lower_for_good() -> None:
    participant = in_round(begin_of(members(1, 2, 3), attempt=3, coordinator=3))
    participant.leave()
    assert participant.at.ballot.number == 3, "a later JOIN tells it, so that the next ballot is higher"
    for lower in (begin_of(members(1, 2), attempt=2), begin_of(members(1, 2), attempt=3, coordinator=1)):
        with pytest.raises(RuleBroken, match=r"attempt \d, and this peer has followed 3"):
            follow(participant, lower)
    with pytest.raises(RuleBroken, match="has followed 3"):
        follow(participant, begin_of(members(1, 2, 3), attempt=3, coordinator=3))  # the same again
    follow(participant, begin_of(members(1, 2), attempt=4))
    assert participant.at.ballot.number == 4


# -- SURVEY and REPAIR


def test_a_successor_is_followed_and_then_its_predecessor_no_more() -> None:
    participant = in_round()
    follow_survey(participant, key(3), survey_of(2, 3))
    assert participant.at.ballot == Ballot(2, key(3))
    assert participant.state.name == "SURVEYED", (
        "what it holds is told: it must not say DONE before it hears how to go on"
    )
    with pytest.raises(RuleBroken, match="attempt 1, and this peer has followed 2"):
        follow_survey(participant, key(1), survey_of(1, 1))
    with pytest.raises(RuleBroken, match="attempt 1, and this peer has followed 2"):
        participant.on_repair(key(1), repair_of(1, 1))
    repair = repair_of(2, 3)
    participant.on_repair(key(3), repair)
    assert round_of(participant).repair is repair
    assert participant.state is MemberState.IN_ROUND


def test_equal_numbers_are_told_apart_by_their_holder() -> None:
    participant = in_round()
    follow_survey(participant, key(3), survey_of(2, 3))
    with pytest.raises(RuleBroken, match="has followed 2"):
        follow_survey(participant, key(1), survey_of(2, 1))
    follow_survey(participant, key(3), survey_of(2, 3))  # asked again, it answers again


@pytest.mark.parametrize(("sender", "holder"), [(1, 3), (9, 9), (9, 3)])
def test_only_a_member_that_holds_a_ballot_can_use_it(sender: int, holder: int) -> None:
    participant = in_round()
    for follow_it in (
        lambda: follow_survey(participant, key(sender), survey_of(2, holder)),
        lambda: participant.on_repair(key(sender), repair_of(2, holder)),
    ):
        with pytest.raises(RuleBroken, match="does not hold that ballot"):
            follow_it()
    assert participant.at.ballot == BEGIN.ballot
    assert round_of(participant).repair is None


def test_a_coordinator_that_is_no_member_of_its_round_may_survey_it() -> None:
    participant = in_round(begin_of(members(2, 3), coordinator=9))
    assert participant.begin is not None
    follow_survey(participant, key(9), survey_of(2, 9, participant.begin))
    assert participant.at.ballot.number == 2


def test_another_round_is_not_surveyed_or_repaired_here() -> None:
    other = begin_of(members(1, 2, 3), attempt=2)
    for participant in (in_round(), participant_at(TIP)):
        with pytest.raises(RuleBroken, match="not in that round"):
            follow_survey(participant, key(1), survey_of(3, 1, other))
        with pytest.raises(RuleBroken, match="not in that round"):
            participant.on_repair(key(1), repair_of(3, 1, begin=other))


def test_a_repair_of_a_chunk_that_does_not_exist_changes_nothing() -> None:
    participant = in_round()
    before = traces(participant)
    sources = (Source(7, key(1), b""), Source(8, key(1), b""))
    with pytest.raises(RuleBroken, match="a repair of chunks that do not exist"):
        participant.on_repair(key(1), repair_of(1, 1, sources))
    assert traces(participant) == before


def test_who_is_counted_out_does_not_answer() -> None:
    with pytest.raises(RuleBroken, match="counts this peer as out"):
        follow_survey(in_round(), key(1), survey_of(2, 1, out=(ME,)))


def test_a_ballot_that_a_member_has_followed_voids_lower_ones_here_too() -> None:
    participant = in_round()
    follow_survey(participant, key(1), survey_of(5, 1))
    assert participant.at.ballot.number == 5
    with pytest.raises(RuleBroken, match="has followed 5"):
        follow_survey(participant, key(3), survey_of(4, 3))
    shown = participant.on_survey(key(3), survey_of(4, 3), [], 0.0)
    assert isinstance(shown, Have)
    assert shown.follows == survey_of(5, 1), "a higher ballot counts only with the survey that made it"


def test_who_still_reaches_the_coordinator_follows_no_successor() -> None:
    participant = in_round()
    participant.view.reaches = lambda key: True
    answer = participant.on_survey(key(3), survey_of(2, 3), [], 0.0)
    assert isinstance(answer, Elsewhere)
    assert answer.begin is BEGIN, "it says in which round it is"
    assert participant.at.ballot == BEGIN.ballot


def test_a_successor_with_the_doubts_of_most_is_followed() -> None:
    participant = in_round()
    participant.view.learn(members(1, 3, 4))
    participant.view.reaches = lambda key: True
    doubts = {n: signer(n).sign(Doubt(TIP, key(1), key(n))) for n in (3, 4, 1)}
    foreign = signer(4).sign(Doubt(TIP, key(1), key(3)))  # in another's name
    survey = survey_of(2, 3)
    for too_few in ((), (doubts[3],), (doubts[3], doubts[3]), (doubts[3], foreign), (doubts[3], doubts[1])):
        claim = signer(3).sign(msgspec.structs.replace(survey, doubts=too_few))
        assert isinstance(participant.on_survey(key(3), claim, [], 0.0), Elsewhere)
    enough = signer(3).sign(msgspec.structs.replace(survey, doubts=(doubts[3], doubts[4])))
    follow_survey(participant, key(3), enough)


def test_an_attempt_that_nobody_can_have_come_to_is_not_followed() -> None:
    participant = in_round()
    with pytest.raises(RuleBroken, match="this peer knows of 1"):
        follow_survey(participant, key(1), survey_of(2 + MAX_LEAP, 1))
    with pytest.raises(RuleBroken, match="this peer knows of 0"):
        follow(participant_at(TIP), begin_of(members(1, 2, 3), attempt=1 + MAX_LEAP))


def test_what_is_not_signed_is_not_followed() -> None:
    unsigned = msgspec.structs.replace(BEGIN, timeout=61.0)
    with pytest.raises(RuleBroken, match="without its coordinator's signature"):
        follow(participant_at(TIP), unsigned, key(3), relayed=True)
    with pytest.raises(RuleBroken, match="not signed by its sender"):
        follow_survey(in_round(), key(1), msgspec.structs.replace(survey_of(2, 1), out=keys(3)))


# -- DONE and COMMIT


def test_done_is_said_under_the_ballot_that_is_followed() -> None:
    participant = in_round()
    has_all(participant)
    follow_survey(participant, key(3), survey_of(2, 3))
    assert round_of(participant).done == Ballot(1, key(1)), "a successor must hear under which ballot this was complete"
    participant.on_repair(key(3), repair_of(2, 3))
    assert participant.state is MemberState.IN_ROUND, "it says DONE again, under the new ballot"


def test_a_new_round_begins_with_a_clean_sheet() -> None:
    participant = in_round()
    has_all(participant)
    follow_survey(participant, key(3), survey_of(2, 3))
    participant.on_repair(key(3), repair_of(2, 3))
    participant.leave()
    assert participant.round is None
    follow(participant, begin_of(members(1, 2), attempt=3))
    assert (round_of(participant).repair, round_of(participant).done) == (None, None)


def test_an_input_that_has_its_result_is_in_no_further_round() -> None:
    """Its owner is about to read the result, so nothing is written over it."""
    participant = in_round()
    participant.has_result(round_of(participant).exchange, commit_of())
    participant.move(commit_of().next_tip)
    with pytest.raises(RuleBroken, match="BEGIN without a JOIN of this peer"):
        follow(participant, begin_of(members(1, 2, 3), tip=participant.at.tip))


def test_how_long_the_last_join_took_is_of_one_round() -> None:
    participant = in_round()
    participant.at.join_to_begin = 0.5  # it coordinates
    participant.has_result(round_of(participant).exchange, commit_of())
    participant.move(commit_of().next_tip)
    participant.withdraw()
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(ME, begin, chunks_of(begin)), send))
    participant.offer(given)
    begin = begin_of(members(1, 3), tip=participant.at.tip)
    missed = Commit(begin.tip, begin.round, digest("r"), 2.0, keys(1, 3), members(1, 2, 3))
    participant.miss(missed)
    fetched = Digests(Book(ME, begin, chunks_of(begin)), participant._send)
    participant.has_result(fetched, missed, missed=True)
    assert participant.given.finished is not None
    assert participant.given.finished.join_to_begin_seconds is None, "another coordinated that round"


class Racing(AtTip):
    """Another thread ends what was missed between any two looks at it."""

    looks = 0

    @property  # type: ignore[override]
    def missed(self) -> Commit | None:
        self.looks += 1
        return commit_of() if self.looks == 1 else None

    @missed.setter
    def missed(self, value: Commit | None) -> None:
        self.looks = 0


def test_any_thread_may_ask_whether_others_are_past_this_state() -> None:
    view = View("run", member(2), lambda key: True)
    participant = Participant(view, TIP, TERMS, [], Silence(15.0, 30.0), signer(1), RedoLog(0))
    participant.made, participant.at = True, Racing(TIP)
    assert participant.behind(0.0) is None


def test_a_commit_moves_it_on_and_what_was_of_the_old_tip_is_void() -> None:
    participant = in_round()
    commit = commit_of()
    participant.advance(commit)
    assert participant.at.tip == TIP.after(commit.round + digest("r"), 3.0)
    assert participant.at.commit is commit
    assert (participant.begin, participant.at.ballot) == (None, NO_BALLOT)
    with pytest.raises(RuleBroken, match="another state"):
        follow(participant, begin_of(members(1, 2, 3), attempt=9))
    assert participant.on_survey(key(3), survey_of(9, 3), [], 0.0) == Have(
        Ballot(9, key(3)), (), None, (), None, commit
    )
    assert participant.at.ballot == NO_BALLOT
    follow(participant, begin_of(members(1, 2, 3), tip=participant.at.tip))


def test_after_a_download_the_last_commit_is_not_its_own_any_more() -> None:
    participant = in_round()
    participant.advance(commit_of())
    elsewhere = Tip(7, digest("x"), 99.0)
    participant.move(elsewhere)
    assert traces(participant) == traces(participant_at(elsewhere))


@pytest.mark.parametrize("role", Role)
def test_the_rules_are_the_same_for_all_roles(role: Role) -> None:
    group = (member(1), member(2, role), member(3))
    participant = in_round(begin_of(group))
    follow_survey(participant, key(3), survey_of(2, 3, begin_of(group)))
    assert participant.at.ballot.number == 2


def test_the_ballot_never_goes_down_at_one_tip() -> None:
    participant = in_round()
    highest = participant.at.ballot
    for number, holder in product((4, 2, 3, 1, 5), (3, 1)):
        try:
            follow_survey(participant, key(holder), survey_of(number, holder))
        except RuleBroken:
            assert Ballot(number, key(holder)) < highest
        else:
            assert Ballot(number, key(holder)) >= highest
        assert participant.at.ballot >= highest
        highest = participant.at.ballot
    assert highest == Ballot(5, key(3))
