"""What one member that breaks the rules can't do: hold a round up, end it twice, or take a turn that is not its own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest

from shoal.swarm.protocol.actions import Ask, Greet, Send
from shoal.swarm.protocol.book import Book, RuleBroken, root_of
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.gathering import Gathering, Until
from shoal.swarm.protocol.leading import NOTICE_SECONDS, Leading, Phase
from shoal.swarm.protocol.messages import (
    MAX_DOUBTS,
    Abort,
    Begin,
    Broken,
    Commit,
    Done,
    Doubt,
    Elsewhere,
    Have,
    Hello,
    Orphaned,
    Ping,
    Pong,
    Repair,
    Survey,
    TakeOver,
)
from shoal.swarm.protocol.participant import MAX_BEGUN, MAX_SIGNERS
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.statements import Signed, Signer
from shoal.swarm.protocol.tip import Ballot, Tip
from shoal.swarm.protocol.view import MAX_HEARSAY, Member, Role, View
from tests.swarm.rounds import (
    IDENTITIES,
    RULES,
    TERMS,
    TIP,
    begin_of,
    begun,
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
from tests.swarm.test_coordinator import ALL, GROUP, ROOT, gathering, join, running, successor, survey_answer, the
from tests.swarm.test_lead import join as send_join
from tests.swarm.test_lead import leading, peer_of
from tests.swarm.test_participant import BEGIN, in_round
from tests.swarm.wire import Digests

NOBODY = 200  # a key that the liar has made: no member


def peer_2(rules: Rules = RULES) -> Peer:
    """It keeps a state, and reaches 3 and 4; this tip is 4's to coordinate."""
    view = View("run", member(2), lambda key: True)
    peer = Peer(view, TERMS, rules, Silence(15.0, 30.0), signer(2), keeps_state=True)
    peer.view.learn(members(3, 4))
    assert peer.participant.coordinator() == member(4), "the order of the candidates has changed"
    return peer


def test_no_coordinator_vouches_for_its_own_round() -> None:
    participant = in_round()
    for signs in range(1, 5):
        participant.on_pong(key(1), Ping(BEGIN.round), Pong(True, signs), 10.0 * signs)
    assert participant.progressed_at < 0.0
    for signs in range(1, 5):
        participant.on_pong(key(3), Ping(BEGIN.round), Pong(True, signs), 10.0 * signs)
    assert participant.progressed_at == 40.0


@pytest.mark.parametrize("coordinator", [3, NOBODY], ids=["itself", "of an invented peer"])
@pytest.mark.parametrize("how", ["BEGIN", "ORPHANED", "SURVEY"])
def test_nobody_begins_a_round_with_who_has_not_joined_it(how: str, coordinator: int) -> None:
    """Else any member takes every turn, and says nothing more."""
    peer = peer_2()
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(key(2), begin, chunks_of(begin)), send))
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    peer.view.reaches = lambda other: other != key(coordinator)
    begin = begin_of(members(2, 3, 4), coordinator=coordinator)
    survey = signer(3).sign(Survey(TIP, begin.round, Ballot(2, key(3)), (), begin))
    message = {"BEGIN": begin, "ORPHANED": Orphaned(begin), "SURVEY": survey}[how]
    with pytest.raises(RuleBroken, match=r"without a JOIN|under the ballot of another"):
        peer.receive(key(3), message, [], 0.0)
    assert peer.participant.begin is None
    peer.receive(key(4), begin_of(members(2, 3, 4), coordinator=4), [], 0.0)
    assert peer.participant.begin is not None


def commit_by(coordinator: int, round_id: bytes = bytes(16), samples: float = 3.0) -> Commit:
    commit = Commit(TIP, round_id, digest("r"), samples, keys(3, 4), members(3, 4), key(coordinator))
    return signer(coordinator).sign(commit)


def test_a_commit_by_an_invented_peer_is_none() -> None:
    """Void ones are remembered by who has signed them: keys without end would hold the run up without end."""
    peer = peer_2()
    with pytest.raises(RuleBroken, match="no member"):
        peer.receive(key(3), commit_by(NOBODY), [], 0.0)
    assert peer.participant.at.missed is None
    peer.receive(key(3), commit_by(4), [], 0.0)
    assert peer.participant.at.missed is not None


def test_a_coordinator_cannot_make_up_how_many_samples_are_behind_a_state() -> None:
    peer = peer_2()
    peer.participant = in_round()
    with pytest.raises(RuleBroken, match="other samples"):
        peer.receive(key(1), commit_by(1, BEGIN.round, 1e300), [], 0.0)
    assert peer.tip == TIP
    peer.receive(key(1), commit_by(1, BEGIN.round, sum(BEGIN.weights)), [], 0.0)
    assert peer.participant.at.missed is not None, "its result is not here"


def test_elsewhere_never_hastens_a_round() -> None:
    """Members that make a slow step would be left out of it."""
    coordinator = gathering(1, 2, 3, 4)
    join(coordinator, 1, patience=10.0)
    join(coordinator, 2, 1.0)
    assert coordinator.elsewhere(key(4), 1.0) == []
    assert coordinator.wake_at() == 10.0


def test_who_is_no_member_postpones_nothing() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, patience=5.0)
    coordinator.tick(5.0)
    before = coordinator.wake_at()
    for number in range(100, 120):
        assert coordinator.elsewhere(key(number), 5.4) == []
    assert coordinator.wake_at() == before


def test_a_member_ends_one_round_of_a_tip_by_being_elsewhere() -> None:
    peer, lead = leading(1, 2, 3)
    begin = begin_of(members(2, 3), coordinator=2, tip=peer.tip)
    begin = signer(2, peer.view.run_id).sign(begin)
    peer.receive(key(2), Elsewhere(member(2), begin), [], 0.0)
    assert lead.phase is Phase.ABORTED
    for number in (1, 2, 3):
        send_join(peer, number)
    again = led_by(peer)
    assert again.phase is Phase.RUNNING
    peer.receive(key(2), Elsewhere(member(2), begin), [], 1.0)
    assert not again.over
    assert set(again.out) == {key(2)}


def test_a_member_ends_one_round_of_a_tip_by_what_it_answers_to_a_survey() -> None:
    peer, lead = leading(1, 2, 3)
    for turn in range(2):
        lead = led_by(peer)
        peer.out.clear()
        peer.answered(key(2), survey_of(lead), Elsewhere(member(1), lead.begin), 0.0)
        if turn == 0:
            assert lead.phase is Phase.ABORTED
            for number in (1, 2, 3):
                send_join(peer, number)
    assert not led_by(peer).over
    assert set(led_by(peer).out) == {key(2)}


def led_by(peer: Peer) -> Leading:
    """The round that it coordinates, or has coordinated last."""
    assert peer.leading is not None
    return peer.leading


def survey_of(lead: Leading) -> Survey:
    """What it asks as the round is surveyed."""
    [ask] = [action for action in lead.start_survey(0.0) if isinstance(action, Ask)]
    assert isinstance(ask.message, Survey)
    return ask.message


def outbids(peer: Peer, number: int, by: int) -> None:
    """That member answers a survey by one of its own, or of a peer that it has made up, under a higher ballot."""
    survey = survey_of(led_by(peer))
    ballot = Ballot(survey.ballot.number + 1, key(by))
    higher = signer(by, peer.view.run_id).sign(Survey(peer.tip, survey.round, ballot, (), None))
    peer.answered(key(number), survey, Have(ballot, (), None, (), None, None, higher), 0.0)


def test_a_coordinator_gives_way_to_a_member_once() -> None:
    peer, lead = leading(1, 2, 3)
    outbids(peer, 2, by=2)
    assert lead.phase is Phase.ABORTED
    for number in (1, 2, 3):
        send_join(peer, number)
    outbids(peer, 2, by=2)
    assert not led_by(peer).over
    assert set(led_by(peer).out) == {key(2)}


def test_a_ballot_of_an_invented_peer_outbids_nobody() -> None:
    peer, lead = leading(1, 2, 3)
    peer.view.reaches = lambda other: other != key(NOBODY)
    outbids(peer, 2, by=NOBODY)
    assert set(lead.out) == {key(2)}


def test_digests_of_another_length_are_the_fault_of_who_lists_them() -> None:
    """In a REPAIR nobody could follow them, and all who refuse it would be put out."""
    peer, lead = leading(1, 2, 3)
    assert lead.begin is not None
    survey = survey_of(lead)
    digests = (b"short",) * lead.begin.starts[-1]
    peer.answered(key(2), survey, have_of(survey.ballot, digests, done=lead.begin.ballot), 0.0)
    assert set(lead.out) == {key(2)}


def test_nobody_is_out_because_one_member_says_that_others_have_put_it_out() -> None:
    coordinator = running(1, 2, 3, 4, 5)
    survey = the(coordinator.start_survey(0.0), Survey)
    for number in (1, 3, 4, 5):
        survey_answer(coordinator, number)
    again = the(survey_answer(coordinator, 2, have_of(survey.ballot, out=keys(1, 3, 4, 5))), Survey)
    assert again.out == keys(2), "who says so of too many is out"


def test_who_always_lacks_something_is_out() -> None:
    """Each REPAIR looks like progress, so without an end there is none."""
    coordinator = running(1, 2, 3, 4)
    assert coordinator.begin is not None
    coordinator.broken(key(2), Broken(coordinator.begin.round, key(3), True, "I do not like it"), True, 0.0)
    for _ in range(10):
        for number in coordinator.live():
            coordinator.surveyed(number, coordinator.ballot, have_of(coordinator.ballot, ALL), 0.0)
        for number in coordinator.live():
            waits = number == key(2)
            ended = Done(coordinator.begin.round, coordinator.ballot, b"" if waits else ROOT, waits)
            coordinator.finished(number, ended, GROUP, 0.0)
    assert set(coordinator.out) == {key(2)}
    assert coordinator.phase is Phase.COMMITTED


def test_of_two_that_are_parted_one_is_out_when_nobody_is_left_between_them() -> None:
    coordinator = running(1, 2, 3)
    assert coordinator.begin is not None
    complaint = Broken(coordinator.begin.round, key(1), True, "I do not reach it")
    coordinator.broken(key(2), complaint, True, 0.0)
    assert not coordinator.out
    assert the(coordinator.put_out(key(3), "lost", 1.0), Survey).out == keys(3, 1)


def test_a_successor_knows_which_pairs_were_parted() -> None:
    coordinator, survey = successor()
    repair = signer(4).sign(Repair(survey.round, Ballot(2, key(4)), (), (keys(2, 3),)))
    coordinator.ballot = Ballot(5, key(1))
    survey = the(coordinator.start_survey(1.0), Survey)
    for number in (1, 2, 3):
        actions = survey_answer(coordinator, number, have_of(survey.ballot, repair=repair))
    survey = the(actions, Survey)
    for number in (1, 2, 3):
        actions = survey_answer(coordinator, number, have_of(survey.ballot, repair=repair))
    assert the(actions, Repair).parted == (keys(2, 3),)


@pytest.mark.parametrize("role", [Role.AUXILIARY, Role.NODE])
def test_two_are_parted_only_if_a_third_holds_what_they_lack(role: Role) -> None:
    gathers = gathering(1, 2, 3)
    gathers.expected[key(1)] = member(1, role)
    for number in (1, 2, 3):
        gathers.join(key(number), join_of(member(number, role if number == 1 else Role.NODE)), b"", 0.0)
    coordinator = begun(gathers)
    coordinator.broken(key(2), Broken(coordinator.begin.round, key(3), True, "I do not reach it"), True, 0.0)
    assert set(coordinator.out) == ({key(3)} if role is Role.AUXILIARY else set())


class Believing(Signer):
    """Believes all signatures."""

    def is_signed(self, message: Signed, key: bytes) -> bool:
        return True


class Counting(Signer):
    """Counts the signatures that are looked at."""

    looked_at = 0

    def is_signed(self, message: Signed, key: bytes) -> bool:
        self.looked_at += 1
        return super().is_signed(message, key)


def doubt_of(number: int, by: int, signed_by: int | None = None) -> Doubt:
    return signer(by if signed_by is None else signed_by).sign(Doubt(TIP, key(number), key(by)))


@pytest.mark.parametrize("how", ["forged", "of peers that are none"])
def test_many_doubts_in_one_message_cost_no_more_than_one(how: str) -> None:
    peer = peer_2()
    peer.signer = peer.participant.signer = signs = Counting(IDENTITIES[2], "run")
    numbers = range(100, 130)
    doubts = [doubt_of(4, by=4, signed_by=3) if how == "forged" else doubt_of(number, by=3) for number in numbers]
    with suppress(RuleBroken):
        peer.receive(key(3), TakeOver(TIP, tuple(doubts)), [], 0.0)
    assert signs.looked_at <= 1
    assert not peer.participant.at.deposed


def test_a_doubt_that_is_repeated_costs_nothing() -> None:
    peer = peer_2()
    peer.view.learn(members(*range(5, 30)))
    peer.signer = peer.participant.signer = signs = Counting(IDENTITIES[2], "run")
    for number in range(3, 30):
        peer.receive(key(3), doubt_of(number, by=3), [], 0.0)
    before = signs.looked_at
    for _ in range(100):
        peer.receive(key(3), doubt_of(4, by=3), [], 0.0)
    assert signs.looked_at == before


def test_doubts_of_a_coordinator_that_is_lost_here_count_for_those_who_still_wait_for_it() -> None:
    """A machine that stands still is lost to one after the other, and was in none of the last rounds."""
    peer = peer_2()
    peer.view.learn(members(5, 6))
    assert peer.view.lose(key(4))
    for number in (3, 5, 6):
        peer.receive(key(number), doubt_of(4, by=number), [], 0.0)
    assert key(4) in peer.participant.at.deposed
    peer.out.clear()
    peer.receive(key(6), doubt_of(4, by=6), [], 1.0)
    (sent,) = peer.out
    assert isinstance(sent, Send)
    assert sent.to == (key(6),)
    assert isinstance(sent.message, TakeOver)
    assert {(doubt.of, doubt.sender) for doubt in sent.message.doubts} >= {(key(4), key(number)) for number in (3, 5)}
    with pytest.raises(RuleBroken, match="no member"):
        peer.receive(key(6), doubt_of(NOBODY, by=6), [], 1.0)


def test_who_has_lost_a_coordinator_doubts_it_with_those_who_wait_for_it() -> None:
    """Else those who still reach it wait, and those who have lost it wait for them."""
    peer = peer_2()
    peer.view.learn(members(5, 6))
    peer.view.reaches = lambda key_: key_ != key(4)
    assert peer.view.lose(key(4))
    peer.receive(key(3), doubt_of(4, by=3), [], 0.0)
    assert not peer.participant.at.deposed
    peer.receive(key(5), doubt_of(4, by=5), [], 0.0)  # two of four; and this peer
    assert key(4) in peer.participant.at.deposed


def successor_of_a_lost_coordinator() -> tuple[Peer, Begin]:
    """Peer 2, in a round of 2 to 5; 4 coordinated it, and is lost here."""
    peer = peer_2()
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(key(2), begin, chunks_of(begin)), send))
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    peer.view.members.update({key(number): member(number, Role.CLIENT) for number in (3, 5)})  # 2 is the next
    begin = begin_of([member(2), member(3, Role.CLIENT), member(4), member(5, Role.CLIENT)], coordinator=4)
    peer.receive(key(4), begin, [], 0.0)
    peer.view.reaches = lambda key_: key_ != key(4)
    peer.view.lose(key(4))
    peer.out.clear()
    peer.lost(key(4), True, 0.0)
    return peer, begin


def test_who_gave_way_in_a_round_asks_again_though_others_have_joined_it_for_another() -> None:
    peer, begin = successor_of_a_lost_coordinator()
    [first] = surveys(peer)
    peer.receive(key(2), first, [], 0.0)
    peer.answered(key(5), first, Elsewhere(member(4), begin), 0.0)
    message = join_of(member(3, Role.CLIENT), tip=peer.tip)
    peer.expect_join(key(3), message)
    peer.receive(key(3), message, [], 0.0)
    assert isinstance(peer.lead, Gathering)
    peer.out.clear()
    peer.succeed(1.0)
    assert [survey.round for survey in surveys(peer)] == [begin.round]


def test_a_survey_that_put_others_out_is_believed_of_who_can_coordinate_the_round() -> None:
    """Who makes it up, or signs it itself, says nothing but its own word."""
    peer, begin = successor_of_a_lost_coordinator()
    lead = led_by(peer)
    for coordinator, believed in ((4, (3,)), (5, ()), (9, ())):
        survey = Survey(begin.tip, begin.round, Ballot(2, key(coordinator)), keys(3), None, ())
        have = have_of(lead.ballot, out=keys(3))
        have = msgspec.structs.replace(have, follows=signer(coordinator).sign(survey))
        assert lead._put_out_before(key(5), have) == keys(*believed)


def test_who_was_asked_before_most_doubted_the_coordinator_is_asked_again() -> None:
    """It has not noticed yet that the coordinator is lost: to put it out would cost it the round."""
    peer, begin = successor_of_a_lost_coordinator()
    [first] = surveys(peer)
    peer.receive(key(3), doubt_of(4, by=3), [], 0.0)
    peer.out.clear()
    peer.answered(key(5), first, Elsewhere(member(4), begin), 0.0)
    [again] = surveys(peer)
    assert {doubt.sender for doubt in again.doubts} == {key(2), key(3)}
    assert set(led_by(peer).out) == {key(4)}
    peer.answered(key(5), again, Elsewhere(member(4), begin), 0.0)
    assert peer.lead is None, "it waits: 5 may not have noticed yet, or count the doubts of others"
    peer.out.clear()
    peer.succeed(NOTICE_SECONDS)
    [last] = surveys(peer)
    peer.answered(key(5), last, Elsewhere(member(4), begin), NOTICE_SECONDS)
    assert set(led_by(peer).out) == {key(4), key(5)}


def test_a_successor_ends_a_round_that_others_have_left() -> None:
    """Its coordinator had ended it before this peer lost it; to put them all out would make a second result."""
    peer, _ = successor_of_a_lost_coordinator()
    [survey] = surveys(peer)
    peer.answered(key(3), survey, Elsewhere(member(4)), 0.0)
    assert led_by(peer).phase is Phase.ABORTED
    assert set(led_by(peer).out) == {key(4)}


def test_who_has_left_a_round_says_so_to_a_successor() -> None:
    participant = in_round()
    participant.on_abort(key(1), Abort(BEGIN.round, "over"))
    survey = signer(3).sign(Survey(BEGIN.tip, BEGIN.round, Ballot(5, key(3)), (), BEGIN))
    answer = participant.on_survey(key(3), survey, [], 0.0)
    assert isinstance(answer, Elsewhere)
    assert answer.begin is None
    assert participant.begin is None


def surveys(peer: Peer) -> list[Survey]:
    return [ask.message for ask in peer.out if isinstance(ask, Ask) and isinstance(ask.message, Survey)]


def test_no_coordinator_begins_two_rounds_under_one_ballot() -> None:
    """Whoever knew of the first, and only they, would take it for a liar from then on."""
    peer = peer_of(1, 2, 3)
    ballots = []
    for number in (2, 3):  # it is in neither of them itself, and 3 knows nothing of the first
        send_join(peer, number)
        peer.tick(RULES.matchmaking_time)
        peer.tick(2 * RULES.matchmaking_time)
        lead = led_by(peer)
        ballots.append(lead.ballot)
        peer.out.extend(lead.abort("it has not got on"))
    assert ballots[0] < ballots[1]


def elsewhere_with(peer: Peer, coordinator: int, attempt: int = 1, chunks: int = 8) -> None:
    """3 says, if that is to be believed, that it is in such a round."""
    begin = begin_of(members(3), coordinator=coordinator, attempt=attempt, chunks=chunks)
    with suppress(RuleBroken):
        peer.receive(key(3), Elsewhere(member(coordinator), begin), [], 0.0)


def test_nobody_has_it_forgotten_that_it_has_begun_a_round_by_signing_many() -> None:
    peer = peer_2()
    elsewhere_with(peer, 4)
    for attempt in range(2, 2 * MAX_BEGUN):
        elsewhere_with(peer, 4, attempt)
    begin = begin_of(members(3), coordinator=4, chunks=9)
    assert not peer.participant.is_begun(begin, key(3)), "the second under its ballot"
    assert len(peer.participant.at.begun[key(4)]) == MAX_BEGUN
    assert not peer.participant._proven, "that is no proof any more"
    elsewhere_with(peer, 4, 2 * MAX_BEGUN - 1, chunks=9)
    assert set(peer.participant._proven) == {key(4)}


def test_nobody_has_it_forgotten_that_a_member_has_begun_a_round() -> None:
    """By the BEGINs of peers that it has made up, which are as many as it likes."""
    peer = peer_2()
    elsewhere_with(peer, 4)
    peer.participant.signer = Believing(IDENTITIES[2], "run")
    for number in range(2 * MAX_SIGNERS):
        stranger = Ballot(1, number.to_bytes(32))
        begin = msgspec.structs.replace(begin_of(members(3), coordinator=4), ballot=stranger)
        with suppress(RuleBroken):
            peer.receive(key(3), Elsewhere(member(4), begin), [], 0.0)
    assert len(peer.participant.at.begun) == MAX_SIGNERS + 1
    elsewhere_with(peer, 4, chunks=9)
    assert set(peer.participant._proven) == {key(4)}


def test_what_invented_peers_have_signed_is_not_held_against_them_for_ever() -> None:
    """They are as many as one likes, and each would be a WARNING."""
    peer = peer_2()
    for number in range(100, 110):
        for chunks in (8, 9):
            begin = begin_of(members(3), coordinator=number, chunks=chunks)
            with suppress(RuleBroken):
                peer.receive(key(3), Elsewhere(member(number), begin), [], 0.0)
    assert not peer.participant._proven
    for chunks in (8, 9):
        with suppress(RuleBroken):
            begin = begin_of(members(3), coordinator=4, chunks=chunks)
            peer.receive(key(3), Elsewhere(member(4), begin), [], 0.0)
    assert set(peer.participant._proven) == {key(4)}


def test_no_coordinator_is_doubted_because_another_says_that_it_brought_very_much() -> None:
    peer = peer_2(replace(RULES, target_samples=30.0))
    for now in (0.0, 10.0):
        peer._history.committed({key(2): 10.0, key(3): 1e15, key(4): 10.0}, now)
    peer.doubts.asked(key(4), 10.0, samples=15.0)
    assert not peer.doubts.is_due(), "all that the others have may be 15, too"
    peer.doubts.asked(key(4), 20.0, samples=20.0)
    assert peer.doubts.is_due()


def test_who_is_behind_doubts_no_coordinator() -> None:
    """It downloads, and on a slow line answers are queued behind the chunks."""
    peer = peer_2()
    coordinator = peer.participant.coordinator().key
    peer.doubts.asked(coordinator, 10.0, samples=0.0)
    peer.told(key(3), TIP.after(b"root", 8.0), 11.0)
    peer.doubts.look(30.0)
    assert coordinator not in peer.participant.at.doubted


def test_as_many_doubts_as_there_are_can_be_passed_on() -> None:
    peer = peer_2()
    for of in range(3):
        peer.participant.at.deposed[key(of)] = None
        peer.doubts._said.update({(key(of), by.to_bytes(32)): doubt_of(of, by=3) for by in range(1000)})
    survey = Survey(TIP, bytes(16), Ballot(2, key(2)), (), None, peer.doubts.evidence)
    assert len(signer(2).sign(survey).doubts) == MAX_DOUBTS


def test_complaints_that_repeat_take_no_memory() -> None:
    coordinator = running(1, 2, 3, 4)
    assert coordinator.begin is not None
    for now in range(100):
        complaint = Broken(coordinator.begin.round, key(3), False, "nothing came from it")
        coordinator.broken(key(2), complaint, True, now / 100)
    assert len(coordinator._judgements) == 1


def disputing(coordinator: Leading, liar: int) -> None:
    """All are done; the liar with another digest, of chunks of which it lacks one."""
    assert coordinator.begin is not None
    lacking = [*ALL[:-1], b""]
    for number in (1, 2, 3, 4):
        if key(number) in coordinator.live():
            root = root_of(lacking) if number == liar else ROOT
            coordinator.finished(key(number), Done(coordinator.begin.round, coordinator.ballot, root), GROUP, 1.0)
    for number in (1, 2, 3, 4):
        if key(number) in coordinator.live():
            held = have_of(coordinator.ballot, lacking if number == liar else ALL, done=coordinator.begin.ballot)
            survey_answer(coordinator, number, held)


def test_who_was_done_and_lacks_a_chunk_is_out() -> None:
    """Nothing would be settled, and its next DONE would be disputed again, without an end."""
    coordinator = running(1, 2, 3, 4)
    for _ in range(10):
        if not coordinator.over:
            disputing(coordinator, liar=4)
    assert set(coordinator.out) == {key(4)}
    assert coordinator.phase is Phase.COMMITTED


def test_a_member_ends_one_round_of_a_tip_by_being_past_it() -> None:
    peer, _ = leading(1, 2, 3)
    ahead = Tip(5, bytes(32), 1e300)
    for turn in range(2):
        hello = Hello(member(2), TERMS, ahead, members(2))
        peer.answered(key(2), survey_of(led_by(peer)), hello, 0.0)
        if turn == 0:
            assert led_by(peer).phase is Phase.ABORTED
            peer.view.ignore(peer.tip, 0.0)
            for number in (1, 2, 3):
                send_join(peer, number)
    assert not led_by(peer).over
    assert set(led_by(peer).out) == {key(2)}


def test_nobody_is_parted_by_a_repair_that_an_invented_peer_has_signed() -> None:
    peer, lead = leading(1, 2, 3, 4, 5)
    assert lead.begin is not None
    survey = survey_of(lead)
    pairs = (keys(1, 3), keys(1, 5), keys(3, 5))
    ballot = Ballot(lead.begin.ballot.number, key(NOBODY))
    forged = signer(NOBODY, peer.view.run_id).sign(Repair(survey.round, max(ballot, lead.begin.ballot), (), pairs))
    for number in (1, 2, 3, 4, 5):
        held = have_of(survey.ballot, repair=forged if number == 2 else None)
        peer.answered(key(number), survey, held, 0.0)
    assert set(lead.out) <= {key(2)}
    assert not lead.parted


def test_what_a_liar_adds_to_a_take_over_is_not_passed_on() -> None:
    """Nobody would follow who passes it on."""
    peer = peer_2()
    peer.view.learn(members(5, 6))
    true = [doubt_of(4, by=number) for number in (3, 5, 6)]
    false = [doubt_of(4, by=5, signed_by=3), doubt_of(4, by=7, signed_by=3)]
    peer.receive(key(3), TakeOver(TIP, (*true, *false)), [], 0.0)
    assert key(4) in peer.participant.at.deposed
    other = peer_2()
    other.view.learn(members(5, 6, 7))
    other.receive(key(3), TakeOver(TIP, peer.doubts.evidence), [], 0.0)
    assert key(4) in other.participant.at.deposed


def test_elsewhere_makes_nobody_dial_without_end() -> None:
    peer, _ = leading(1, 2, 3)
    begin = signer(2, peer.view.run_id).sign(begin_of(members(2, 3), coordinator=2, tip=peer.tip))
    peer.out.clear()
    for number in range(400):
        ghost = Member(number.to_bytes(32), ("/ip4/10.0.0.1/tcp/1",), Role.NODE)
        peer.receive(key(2), Elsewhere(ghost, begin), [], 0.0)
    assert sum(isinstance(action, Greet) for action in peer.out) <= MAX_HEARSAY


def test_one_member_that_joins_calls_no_round() -> None:
    rules = replace(RULES, target_samples=100.0)
    coordinator = gathering(1, 2, 3, 4, rules=rules)
    assert join(coordinator, 4, weight=1.0, patience=0.0) == []
    assert coordinator.tick(1000.0) == []
    assert coordinator.phase is Until.CALL


def test_who_leaves_again_and_again_has_nobody_tell_all_of_the_last_commit_each_time() -> None:
    peer = peer_2()
    peer.receive(key(3), commit_by(4), [], 0.0)
    peer.out.clear()
    for _ in range(20):
        peer.view.lose(key(3))
        peer.lost(key(3), True, 0.0)
        peer.view.returned(member(3))
    assert sum(isinstance(one, Send) and isinstance(one.message, Commit) for one in peer.out) == 1


def test_no_round_counts_other_samples_of_a_member_than_it_brings() -> None:
    """It may have withdrawn what it joined with, and have joined with another input, before BEGIN came."""
    peer = peer_2()
    given = Contribution(1.0, lambda begin, send, fault: Digests(Book(key(2), begin, chunks_of(begin)), send), tip=TIP)
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    with pytest.raises(RuleBroken, match="counts 4 samples"):
        peer.receive(key(4), begin_of(members(2, 3, 4), coordinator=4, weights=(4.0, 1.0, 1.0)), [], 0.0)
    peer.receive(key(4), begin_of(members(2, 3, 4), coordinator=4, attempt=2), [], 0.0)
    assert peer.participant.begin is not None


@pytest.mark.parametrize("what", ["machines", "states", "averages"])
def test_no_round_says_other_things_of_a_member_than_it_has_joined_with(what: str) -> None:
    """By what a coordinator says of the others' states, it could have each of them drop its step and download."""
    peer = peer_2()
    given = Contribution(
        1.0,
        lambda begin, send, fault: Digests(Book(key(2), begin, chunks_of(begin)), send),
        tip=TIP,
        machine="mine",
        state=digest("1"),
        average=digest("3"),
    )
    peer.participant.offer(given)
    peer.participant.next_step(0.0)
    honest = begin_of(members(2, 3, 4), coordinator=4)
    said = {"machines": ("mine", "", ""), "states": (digest("1"), b"", b""), "averages": (digest("3"), b"", b"")}
    honest = msgspec.structs.replace(honest, **said)
    other = {"machines": ("other", "", ""), "states": (digest("2"), b"", b""), "averages": (b"",) * 3}[what]
    with pytest.raises(RuleBroken, match="another machine, state or average"):
        peer.receive(key(4), signer(4).sign(msgspec.structs.replace(honest, **{what: other})), [], 0.0)
    higher = msgspec.structs.replace(honest, ballot=Ballot(2, key(4)))
    peer.receive(key(4), signer(4).sign(higher), [], 0.0)
    assert peer.participant.begin is not None


def test_doubts_of_a_deposed_coordinator_that_repeat_are_answered_once() -> None:
    """The answer is all the evidence: up to 350 kB."""
    peer = peer_2()
    peer.view.learn(members(5))
    for number in (3, 5):
        peer.receive(key(number), doubt_of(4, by=number), [], 0.0)
    assert key(4) in peer.participant.at.deposed

    def answers() -> int:
        return sum(
            isinstance(action, Send) and action.to == (key(5),) and isinstance(action.message, TakeOver)
            for action in peer.out
        )

    peer.out.clear()
    for _ in range(10):
        peer.receive(key(5), doubt_of(4, by=5), [], 0.0)
    assert answers() == 1
    peer.lost(key(5), True, 0.0)
    peer.receive(key(5), doubt_of(4, by=5), [], 0.0)
    assert answers() == 2, "it may have gone with the connection"


def test_a_deposed_coordinator_that_was_away_hears_of_it_when_it_is_back() -> None:
    """Else each of the two would wait for the other to join it, for ever where `min_peers` is both."""
    peer = peer_2()
    for number in (3, 4):
        peer.doubts.doubt(key(number))
        peer.receive(key(7 - number), doubt_of(number, by=7 - number), [], 0.0)
    assert peer.participant.at.deposed.keys() == {key(3), key(4)}

    def told() -> list[tuple[bytes, ...]]:
        peer.out.clear()
        peer.look(lambda _: 0, 1.0)
        return [a.to for a in peer.out if isinstance(a, Send) and isinstance(a.message, TakeOver)]

    assert peer.participant.coordinator().key == key(2)
    told()
    assert told() == []
    assert peer.view.lose(key(4))
    peer.lost(key(4), True, 1.0)
    peer.view.returned(member(4))
    assert told() == [(key(4),)]
    assert told() == []
