"""The coordinator's decisions for one tip: when it begins, whom it puts out, what it repairs, and what it commits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_struct

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.answers import repaired
from shoal.swarm.protocol.book import Book, RuleBroken, root_of
from shoal.swarm.protocol.gathering import REMINDER_SECONDS, Gathering, Until
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.leading import Leading, Phase
from shoal.swarm.protocol.lifetimes import InRound
from shoal.swarm.protocol.loss import Loss, LossKind
from shoal.swarm.protocol.messages import (
    MAX_GATHER_BYTES,
    Abort,
    Begin,
    Call,
    Commit,
    Done,
    Have,
    Progress,
    Repair,
    Source,
    Survey,
)
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import MAX_LEAP, Ballot, Tip
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Reach, Role
from shoal.swarm.protocol.witnesses import Witnesses
from tests.swarm.rounds import (
    RULES,
    TIP,
    at_tip,
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
from tests.swarm.wire import Digests

GROUP = members(1, 2, 3, 4)
ROOT = root_of([digest(letter) for letter in "abcdefgh"])
ALL = [digest(letter) for letter in "abcdefgh"]


def gathering(*numbers: int, rules: Rules = RULES, **options: Any) -> Gathering:
    """Peer 1 coordinates, and expects these."""
    coordinator = Gathering(key(1), at_tip(), rules, signer(1), **options)
    assert coordinator.expect(members(*numbers), 0.0) == []
    return coordinator


def join(coordinator: Gathering | Leading, number: int, now: float = 0.0, **join_options: Any) -> list[Send | Ask]:
    return coordinator.join(key(number), join_of(member(number), **join_options), b"g%d" % number, now)


def running(*numbers: int, **options: Any) -> Leading:
    """All of these have joined, and the round has begun."""
    coordinator = gathering(*numbers, **options)
    for number in numbers:
        join(coordinator, number)
    return begun(coordinator)


def done(coordinator: Leading, number: int, root: bytes = ROOT, ballot: Ballot | None = None) -> list[Send | Ask]:
    assert coordinator.begin is not None
    ballot = ballot or coordinator.ballot
    assert ballot is not None
    return coordinator.finished(key(number), Done(coordinator.begin.round, ballot, root), GROUP, 1.0)


def survey_answer(coordinator: Leading, number: int, have: Have | None = None) -> list[Send | Ask]:
    assert coordinator.ballot is not None
    return coordinator.surveyed(key(number), coordinator.ballot, have or have_of(coordinator.ballot), 1.0)


def the(actions: list[Send | Ask], kind: type) -> Any:
    """The one message of that kind."""
    [found] = [action.message for action in actions if isinstance(action.message, kind)]
    return found


def told(actions: list[Send | Ask], kind: type) -> set[bytes]:
    return {to for action in actions if isinstance(action.message, kind) for to in action.to}


# -- until BEGIN


def test_it_begins_as_soon_as_all_that_are_expected_have_joined() -> None:
    coordinator = gathering(1, 2, 3)
    assert told(join(coordinator, 2), Call) == set(keys(1, 2, 3)), "the first JOIN calls all"
    assert join(coordinator, 1, 1.0) == []
    [action] = join(coordinator, 3, 2.0)
    assert action.to == keys(1, 2, 3)
    begin = action.message
    assert isinstance(begin, Begin)
    assert begin.members == members(1, 2, 3), "in the order of keys, whoever joined first"
    assert begin.ballot == Ballot(1, key(1))
    assert begin.starts[0] == 0
    assert begin.starts[-1] == 8
    assert begun(coordinator, 2.0).wake_at() == 2.0 + RULES.round_timeout
    assert begin.timeout == RULES.round_timeout
    assert coordinator.gathered[key(3)] == b"g3"


def test_weights_stay_with_their_members_and_the_ballot_is_higher_than_all_that_were_followed() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 3, weight=30.0, attempt=6)
    join(coordinator, 1, weight=10.0, attempt=2)
    begin = the(join(coordinator, 2, weight=0.0), Begin)
    assert begin.weights == (10.0, 0.0, 30.0)
    assert begin.ballot == Ballot(7, key(1))


def test_begin_has_the_mean_loss_of_the_joins_or_none() -> None:
    for last, mean in ((Loss(8.0, LossKind.FLOAT32), Loss(7.0, LossKind.FLOAT32)), (None, None)):
        coordinator = gathering(1, 2, 3)
        for number, weight, loss in ((1, 1.0, Loss(4.0, LossKind.FLOAT32)), (2, 3.0, last), (3, 0.0, None)):
            message = replace_struct(join_of(member(number), weight=weight), loss=loss)
            actions = coordinator.join(key(number), message, b"", 0.0)
        assert the(actions, Begin).loss == mean


@pytest.mark.parametrize(
    ("attempts", "number"),
    [
        ((200_000, 200_000, 200_000), 200_001),  # a liar's surveys have led all to it
        ((7, 7, 1 << 50), 8),  # one member lies, or was led there alone
        ((1 << 50, 7, 7), 8),  # the coordinator itself was
        ((7, 7 + MAX_LEAP, 8 + MAX_LEAP), 9 + MAX_LEAP),  # most are near it
    ],
)
def test_one_that_follows_a_very_high_ballot_does_not_keep_the_others_from_following_this_one(
    attempts: tuple[int, int, int], number: int
) -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, attempt=attempts[0])
    join(coordinator, 2, attempt=attempts[1])
    begin = the(join(coordinator, 3, attempt=attempts[2]), Begin)
    assert begin.ballot == Ballot(number, key(1))


def test_a_very_high_ballot_does_not_count_if_its_follower_alone_has_joined() -> None:
    """Otherwise this peer's own ballot stays so high at this tip that no member follows it any more."""
    coordinator = gathering(1, 2, 3)
    join(coordinator, 2, attempt=(1 << 52) - 1)
    coordinator.tick(coordinator.deadline)
    assert the(coordinator.tick(coordinator.deadline), Begin).ballot == Ballot(1, key(1))


def test_who_does_not_join_is_called_once_more_and_then_left_out() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1, patience=5.0)
    join(coordinator, 2, 1.0, patience=99.0)
    assert coordinator.wake_at() == 5.0, "the first who joins says how long it waits"
    assert coordinator.tick(4.9) == []
    [reminder] = coordinator.tick(5.0)
    assert isinstance(reminder.message, Call)
    assert reminder.to == keys(3)
    assert coordinator.wake_at() == 5.0 + REMINDER_SECONDS
    assert coordinator.tick(5.1) == []
    begin = the(coordinator.tick(5.0 + REMINDER_SECONDS), Begin)
    assert begin.members == members(1, 2)


def test_it_waits_while_a_member_is_in_a_round_of_another_coordinator() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1)
    join(coordinator, 2)
    coordinator.tick(5.0)
    assert coordinator.elsewhere(key(3), 5.4) == []
    assert coordinator.tick(5.8) == [], "it began without one that is in another round"
    assert coordinator.elsewhere(key(3), 5.8) == [], "one postpones a round once"
    assert told(coordinator.tick(6.0), Call) == set(keys(3)), "that round may be over: it is called again"
    assert the(coordinator.tick(6.0 + REMINDER_SECONDS), Begin)


def test_a_member_that_is_lost_while_it_gathers_is_not_waited_for() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 1)
    join(coordinator, 3)
    begin = the(coordinator.expect(members(1, 3), 1.0), Begin)
    assert begin.members == members(1, 3)


def test_who_joined_and_was_lost_before_begin_is_not_in_it() -> None:
    coordinator = gathering(1, 2, 3)
    join(coordinator, 2)
    join(coordinator, 1)
    coordinator.expect(members(1, 3), 1.0)
    assert key(2) not in coordinator.joins
    assert key(2) not in coordinator.gathered
    assert the(join(coordinator, 3, 2.0), Begin).members == members(1, 3)


def test_before_all_may_have_been_found_it_waits_although_all_known_have_joined() -> None:
    coordinator = gathering(1, 2, settled_at=1.0)
    join(coordinator, 1)
    join(coordinator, 2, 0.1)
    assert coordinator.phase is Until.BEGIN
    assert coordinator.wake_at() == 1.0
    assert coordinator.tick(0.9) == []
    assert the(coordinator.tick(1.0), Begin)


def test_a_join_counts_once_and_the_last_one_counts() -> None:
    coordinator = gathering(1, 2)
    join(coordinator, 2, weight=1.0)
    join(coordinator, 2, weight=5.0)
    assert coordinator.phase is Until.BEGIN
    assert the(join(coordinator, 1), Begin).weights == (1.0, 5.0)


def test_a_group_has_so_many_at_least_and_so_many_at_most() -> None:
    coordinator = gathering(1, 2, 3, rules=replace(RULES, min_group=2))
    join(coordinator, 1)
    assert coordinator.wake_at() is None
    assert coordinator.tick(1000.0) == [], "alone it begins nothing, however long it waits"
    assert the(join(coordinator, 2, 1000.0), Call)
    assert the(coordinator.tick(1001.0), Begin).members == members(1, 2)

    coordinator = gathering(1, 2, 3, 4, rules=replace(RULES, target_group=2))
    join(coordinator, 3)
    assert the(join(coordinator, 4), Begin).members == members(3, 4)


def test_nothing_begins_with_clients_alone() -> None:
    rules = replace(RULES, target_group=2)
    coordinator = Gathering(key(1), at_tip(), rules, signer(1))
    clients = [member(n, Role.CLIENT) for n in (2, 3)]
    coordinator.expect([*clients, member(4)], 0.0)
    for client in clients:
        coordinator.join(client.key, join_of(client), b"", 0.0)
    assert coordinator.tick(100.0) == []
    begin = the(coordinator.join(key(4), join_of(member(4)), b"", 101.0), Begin)
    assert begin.members == (clients[0], member(4)), "one who can reduce is among them"


def test_a_group_of_those_who_joined_first_has_one_who_is_not_relayed() -> None:
    rules = replace(RULES, target_group=2, target_samples=10.0)
    coordinator = Gathering(key(1), at_tip(), rules, signer(1))
    relayed = [replace_struct(member(n), reach=Reach.RELAYED) for n in (2, 3)]
    coordinator.expect([member(1), *relayed], 0.0)
    for each in relayed:
        coordinator.joins[each.key] = join_of(each)
    begin = the(coordinator.join(key(1), join_of(member(1), weight=10.0), b"", 0.0), Begin)
    assert begin.members == (member(1), relayed[0])


def test_who_joins_after_begin_waits_and_hears_of_an_abort() -> None:
    coordinator = running(1, 2)
    assert join(coordinator, 3, 5.0) == []
    assert coordinator.begin is not None
    assert coordinator.begin.members == members(1, 2)
    assert told(coordinator.abort("why not"), Abort) == set(keys(1, 2, 3))


def test_what_all_gather_fits_the_begin() -> None:
    """Each may gather 64 KiB, and there may be more than 64 of them."""
    numbers = range(1, 81)
    coordinator = gathering(*numbers)
    most = bytes(MAX_GATHER_BYTES)
    for number in range(1, 64):
        coordinator.join(key(number), join_of(member(number)), most, 0.0)
    coordinator.join(key(63), join_of(member(63)), most, 0.0)  # again: it counts once
    with pytest.raises(RuleBroken, match="gather takes 65536 bytes"):
        coordinator.join(key(64), join_of(member(64)), most, 0.0)
    assert len(coordinator.joins) == 63
    keys_of_all = {number.to_bytes(32, "big"): b"" for number in range(MAX_MEMBERS - 63)}
    assert len(msgspec.msgpack.encode({**coordinator.gathered, **keys_of_all})) <= MAX_BUFFER_BYTES


# -- counting samples

COUNTING = replace(RULES, target_samples=64.0)


def report(coordinator: Gathering, number: int, samples: float, now: float = 0.0) -> tuple[Any, list[Send | Ask]]:
    return coordinator.progress(key(number), Progress(TIP, samples, samples / 10), now)


def test_a_round_is_called_when_there_are_enough_samples() -> None:
    coordinator = gathering(1, 2, 3, rules=COUNTING)
    count, actions = report(coordinator, 1, 30.0)
    assert (count.samples, count.rate, count.peers, count.called) == (30.0, 3.0, 1, False)
    assert actions == []
    report(coordinator, 1, 40.0)
    count, actions = report(coordinator, 2, 24.0, 7.0)
    assert (count.samples, count.peers, count.called) == (64.0, 2, True)
    assert told(actions, Call) == set(keys(1, 2, 3))
    assert coordinator.phase is Until.BEGIN
    assert report(coordinator, 2, 30.0)[1] == [], "it is called once"


def test_a_round_is_called_by_samples_that_were_reported_and_by_no_others() -> None:
    """However much is under way, and however long ago, by any speed."""
    coordinator = gathering(1, 2, rules=COUNTING)
    coordinator.progress(key(1), Progress(TIP, 60.0, 1000.0, step=60.0, seconds=0.06), 0.0)
    asks = Progress(TIP, 3.0, 10.0, step=3.0, seconds=0.3, asks=True)
    count, actions = coordinator.progress(key(2), asks, 0.05)
    assert (count.samples, count.under_way, count.called) == (63.0, 60.0, False)
    assert count.wait == pytest.approx(0.12 - 0.05), "the others are counted on, for a while"
    assert actions == []
    count, actions = coordinator.progress(key(2), asks, 100.0)
    assert (count.wait, count.called, actions) == (0.0, False, [])
    assert coordinator.tick(200.0) == []
    assert coordinator.phase is Until.CALL


def test_a_report_that_is_repeated_begins_no_new_step() -> None:
    """One that says again what it has, to hear what the others have, is where it was in its step."""
    coordinator = gathering(1, 2, rules=COUNTING)
    first = Progress(TIP, 30.0, 30.0, step=30.0, seconds=1.0)
    asks = Progress(TIP, 30.0, 30.0, step=30.0, seconds=1.0, asks=True)
    coordinator.progress(key(1), first, 0.0)
    coordinator.progress(key(1), first, 1.9)
    assert coordinator.progress(key(2), asks, 1.95)[0].wait == pytest.approx(0.05)
    coordinator.progress(key(2), replace_asks(asks), 1.96)
    assert coordinator.progress(key(1), asks, 1.97)[0].wait == 0.0, "the other one waits, and is not under way"


def test_one_that_only_wants_to_know_is_not_counted() -> None:
    coordinator = gathering(1, 2, rules=COUNTING)
    report(coordinator, 1, 30.0)
    count, _ = coordinator.progress(key(2), Progress(TIP, 0.0, 0.0, counted=False), 0.0)
    assert (count.samples, count.peers) == (30.0, 1)
    assert coordinator.progress(key(1), Progress(TIP, 31.0, 3.0), 0.0)[0].peers == 1


def replace_asks(report: Progress) -> Progress:
    return msgspec.structs.replace(report, asks=False)


def test_who_left_does_not_count() -> None:
    coordinator = gathering(1, 2, rules=COUNTING)
    report(coordinator, 2, 40.0)
    coordinator.expect(members(1), 0.0)
    count, actions = report(coordinator, 1, 30.0)
    assert (count.samples, count.peers, actions) == (30.0, 1, [])


EACH = replace(RULES, target_samples=8.0, target_is_each=True)


def test_where_each_is_to_bring_so_much_a_round_is_called_when_all_have_it_on_average() -> None:
    coordinator = gathering(1, 2, 3, rules=EACH, veterans=frozenset(keys(1, 2, 3)))
    assert report(coordinator, 1, 8.0)[0].called is False
    assert report(coordinator, 2, 10.0)[0].called is False
    assert report(coordinator, 3, 5.0)[0].target == 24.0
    count, actions = report(coordinator, 3, 6.0)
    assert (count.samples, count.called) == (24.0, True)
    assert told(actions, Call) == set(keys(1, 2, 3))


def test_a_newcomer_that_has_not_reported_is_to_bring_nothing() -> None:
    coordinator = gathering(1, 2, 3, rules=EACH, veterans=frozenset(keys(1, 2)))
    report(coordinator, 1, 8.0)
    assert report(coordinator, 2, 8.0)[0].called


def test_a_newcomer_in_the_midst_of_an_epoch_brings_what_it_has_by_then() -> None:
    coordinator = gathering(1, 2, 3, rules=EACH, veterans=frozenset(keys(1, 2)))
    report(coordinator, 1, 8.0)
    count, _ = report(coordinator, 3, 2.0)
    assert (count.target, count.called) == (18.0, False)
    assert report(coordinator, 2, 7.0)[0].called is False
    assert report(coordinator, 3, 6.0)[0].called is False, "the veterans make their parts"
    assert report(coordinator, 2, 8.0)[0].called


def test_a_newcomer_that_coordinates_takes_the_others_for_veterans() -> None:
    coordinator = gathering(1, 2, 3, rules=EACH, all_until=1.0)
    report(coordinator, 1, 2.0)
    assert report(coordinator, 2, 8.0)[0].target == 18.0
    assert report(coordinator, 3, 8.0)[0].called


def test_newcomers_whose_veterans_are_all_gone_make_whole_parts() -> None:
    coordinator = gathering(1, 3, rules=EACH, veterans=frozenset(keys(2, 4)))
    report(coordinator, 1, 2.0)
    assert report(coordinator, 3, 8.0)[0].called is False
    assert report(coordinator, 1, 8.0)[0].called


def test_the_first_epoch_ends_earlier_where_the_average_is_applied_late() -> None:
    for tip in (Tip.genesis("r"), Tip.genesis("r").after(bytes(32), 1.0)):
        coordinator = Gathering(key(1), at_tip(tip=tip), replace(EACH, ahead=2.0), signer(1))
        coordinator.expect(members(1, 2), 0.0)
        coordinator.progress(key(1), Progress(tip, 6.0, 1.0), 0.0)
        assert coordinator.progress(key(2), Progress(tip, 6.0, 1.0), 0.0)[0].called == (tip.epoch == 0)


def test_what_one_that_left_was_to_bring_is_not_waited_for() -> None:
    """The others have made their part, and say nothing more while they wait."""
    coordinator = gathering(1, 2, 3, rules=EACH, veterans=frozenset(keys(1, 2, 3)))
    report(coordinator, 1, 8.0)
    report(coordinator, 2, 8.0)
    assert coordinator.phase is Until.CALL
    assert told(coordinator.expect(members(1, 2), 1.0), Call) == set(keys(1, 2))


def test_one_of_many_that_is_left_alone_counts_in_full() -> None:
    history = History()
    for number in range(4):
        history.committed(dict.fromkeys(keys(*range(1, 11)), 16.0), 10.0 * number)
    everyone = frozenset(keys(*range(1, 11)))
    coordinator = gathering(1, 2, rules=EACH, veterans=everyone, history=history)
    report(coordinator, 1, 8.0, 35.0)
    assert report(coordinator, 2, 8.0, 35.0)[0].called


@pytest.mark.parametrize("veterans", [frozenset(), frozenset(keys(*range(1, 11)))])
def test_many_that_say_nothing_do_not_hold_up_the_few_that_train(veterans: frozenset[bytes]) -> None:
    """They may be waiting for their data, or be made up. As many are counted on as have begun."""
    coordinator = gathering(*range(1, 11), rules=EACH, veterans=veterans)
    report(coordinator, 1, 8.0)
    count, _ = report(coordinator, 2, 8.0)
    assert (count.called, count.target) == (False, 32.0)
    report(coordinator, 1, 16.0)
    assert report(coordinator, 2, 16.0)[0].called


def test_one_that_joins_rounds_and_brings_nothing_is_to_bring_nothing() -> None:
    """As with `step(batch_size=0)`."""
    history = History()
    history.committed({key(1): 16.0, key(2): 0.0}, 10.0)
    coordinator = gathering(1, 2, rules=EACH, veterans=frozenset(keys(1, 2)), history=history)
    report(coordinator, 2, 0.0)
    assert report(coordinator, 1, 8.0)[0].called
    again = gathering(1, 2, rules=EACH, veterans=frozenset(keys(1, 2)), history=history)
    report(again, 2, 1.0)  # it trains now
    assert not report(again, 1, 8.0)[0].called


def test_a_newcomer_that_is_still_downloading_is_not_waited_for() -> None:
    coordinator = gathering(1, 2, 3, rules=COUNTING, veterans=frozenset(keys(1, 2)))
    report(coordinator, 1, 64.0)
    join(coordinator, 1)
    assert the(join(coordinator, 2), Begin).members == members(1, 2)


def test_a_newcomer_that_has_reported_is_waited_for_and_so_is_a_veteran_that_has_not() -> None:
    coordinator = gathering(1, 2, 3, rules=COUNTING, veterans=frozenset(keys(1, 2)))
    report(coordinator, 1, 60.0)
    report(coordinator, 3, 4.0)
    join(coordinator, 1)
    assert join(coordinator, 3) == [], "a veteran has not joined"
    assert the(join(coordinator, 2), Begin).members == members(1, 2, 3)


COUNTED = replace(RULES, target_samples=100.0)


def counting(rules: Rules = COUNTED, *numbers: int) -> Gathering:
    """These members have reported 40 samples each, and are called."""
    coordinator = gathering(1, *numbers, rules=rules)
    for number in numbers:
        coordinator.progress(key(number), Progress(TIP, 40.0, 1.0), 0.0)
    assert coordinator.phase is Until.BEGIN
    return coordinator


def begins_at(coordinator: Gathering) -> float:
    """When the round begins if nobody else joins."""
    now = 0.0
    while coordinator.phase is Until.BEGIN and now < 1000.0:
        at = coordinator.wake_at()
        now = 1000.0 if at is None else max(now, at)
        coordinator.tick(now)
    return now


def test_a_round_of_nothing_does_not_end_the_epoch_of_those_who_have_samples() -> None:
    """One that comes without samples and joins first made an epoch of nothing alone, and the others' samples were
    lost."""
    coordinator = counting(COUNTED, 2, 3, 4)
    join(coordinator, 1, weight=0.0)
    assert begins_at(coordinator) == 1000.0
    join(coordinator, 2, 1000.0, weight=40.0)
    coordinator.tick(1000.0 + REMINDER_SECONDS)
    assert coordinator.begin is not None


def test_a_round_of_nothing_begins_if_nobody_else_has_anything() -> None:
    """The gradients of all who have reported may be infinite."""
    coordinator = counting(COUNTED, 2, 3, 4)
    for number in (2, 3, 4):
        join(coordinator, number, weight=0.0)
    assert begins_at(coordinator) < 100.0


@pytest.mark.parametrize(
    ("own_rounds", "joined", "least", "most"), [(0.0, 1, 10.0, 12.0), (30.0, 1, 40.0, 42.0), (30.0, 2, 0.0, 12.0)]
)
def test_while_few_have_joined_it_waits_for_the_rounds_of_their_own(
    own_rounds: float, joined: int, least: float, most: float
) -> None:
    coordinator = counting(replace(COUNTED, own_rounds=own_rounds), 2, 3, 4)
    for number in (2, 3)[:joined]:
        join(coordinator, number, weight=40.0)
    assert least <= begins_at(coordinator) <= most


def test_after_a_vain_wait_for_own_rounds_it_waits_again_soon() -> None:
    """A stopped member holds most of the others up in their own rounds, for many epochs."""
    coordinator = counting(replace(COUNTED, own_rounds=30.0), 2, 3, 4)
    join(coordinator, 2, weight=40.0)
    at = begins_at(coordinator)
    assert coordinator.history.hurries_until == pytest.approx(2 * at)


def test_who_has_gone_back_to_an_earlier_state_is_not_waited_for() -> None:
    coordinator = gathering(1, 2, rules=COUNTED, veterans=frozenset(keys(1, 2)))
    coordinator.progress(key(1), Progress(TIP, 100.0, 1.0), 0.0)
    join(coordinator, 1, weight=100.0)
    assert coordinator.phase is Until.BEGIN, "it waits for a member of the last round"
    assert [action.message for action in coordinator.went_back(key(2), 1.0) if isinstance(action.message, Begin)]


# -- from BEGIN to COMMIT


def test_it_commits_when_all_have_said_the_same() -> None:
    coordinator = running(1, 2, 3)
    assert done(coordinator, 1) == done(coordinator, 2) == []
    assert done(coordinator, 2) == [], "one member counts once"
    [action] = done(coordinator, 3)
    assert coordinator.phase is Phase.COMMITTED
    commit = action.message
    assert isinstance(commit, Commit)
    assert (commit.root, commit.samples, commit.members, commit.view) == (ROOT, 3.0, keys(1, 2, 3), GROUP)
    assert set(action.to) == set(keys(1, 2, 3, 4)), "who was not in the round hears of it too"
    assert coordinator.wake_at() is None


def test_an_auxiliary_has_no_digest_to_compare() -> None:
    coordinator = running(1, 2, 3)
    done(coordinator, 2, b"")
    done(coordinator, 1)
    assert the(done(coordinator, 3), Commit).root == ROOT


def test_a_round_of_auxiliaries_commits_that_there_was_nothing() -> None:
    coordinator = running(1, 2)
    done(coordinator, 1, b"")
    assert the(done(coordinator, 2, b""), Commit).root == root_of(())


def test_done_under_another_ballot_or_from_a_stranger_counts_as_nothing() -> None:
    coordinator = running(1, 2)
    done(coordinator, 1)
    assert done(coordinator, 2, ballot=Ballot(0, key(1))) == []
    assert done(coordinator, 2, ballot=Ballot(1, key(2))) == []
    assert done(coordinator, 9) == []
    assert coordinator.phase is Phase.RUNNING


def test_digests_that_differ_are_never_committed() -> None:
    coordinator = running(1, 2, 3)
    done(coordinator, 1)
    done(coordinator, 2, digest("x"))
    actions = done(coordinator, 3)
    assert the(actions, Survey).ballot == Ballot(2, key(1))
    assert coordinator.phase is Phase.SURVEYING


def test_the_version_that_more_members_hold_is_the_result() -> None:
    coordinator = running(1, 2, 3)
    lied = [digest("x"), *ALL[1:]]
    for number, root in ((1, ROOT), (2, root_of(lied)), (3, ROOT)):
        done(coordinator, number, root)
    ballot = coordinator.ballot
    assert ballot is not None
    complete = Ballot(1, key(1))
    for number, digests in ((1, ALL), (2, lied), (3, ALL)):
        actions = survey_answer(coordinator, number, have_of(ballot, digests, done=complete))
    [source] = the(actions, Repair).sources
    assert (source.chunk, source.digest) == (0, digest("a"))
    assert source.owner in keys(1, 3)


def test_a_round_that_does_not_end_is_aborted() -> None:
    coordinator = running(1, 2)
    assert coordinator.tick(59.9) == []
    actions = coordinator.tick(60.0)
    assert told(actions, Abort) == set(keys(1, 2))
    assert the(actions, Abort).reason == "the round has made no progress for 60 s"
    assert coordinator.phase is Phase.ABORTED
    assert done(coordinator, 1) == done(coordinator, 2) == []


def test_a_survey_does_not_prolong_a_round() -> None:
    coordinator = running(1, 2, 3)
    coordinator.put_out(key(3), "lost", 50.0)
    assert coordinator.wake_at() == 60.0
    assert told(coordinator.tick(60.0), Abort) == set(keys(1, 2))


# -- somebody is lost


def test_the_others_go_on_without_a_member_that_is_lost() -> None:
    coordinator = running(1, 2, 3)
    done(coordinator, 1)
    actions = coordinator.put_out(key(3), "the connection to it was lost", 1.0)
    assert told(actions, Abort) == {key(3)}, "should it live, it hears that and why"
    assert the(actions, Abort).reason == "the connection to it was lost"
    survey = the(actions, Survey)
    assert told(actions, Survey) == set(keys(1, 2))
    assert (survey.ballot, survey.out, survey.begin) == (Ballot(2, key(1)), keys(3), None)
    assert coordinator.put_out(key(3), "again", 1.0) == []
    assert done(coordinator, 2, ballot=Ballot(1, key(1))) == [], "DONE from before the survey is void"
    survey_answer(coordinator, 1)
    repair = the(survey_answer(coordinator, 2), Repair)
    assert repair.ballot == Ballot(2, key(1))
    done(coordinator, 1)
    commit = the(done(coordinator, 2), Commit)
    assert commit.view == members(1, 2, 4), "who was put out is not in the next view"
    assert commit.samples == 3.0


def test_a_dead_reducers_chunks_are_fetched_from_who_has_them_and_the_others_reduced_again() -> None:
    coordinator = running(1, 2, 3, 4)  # two chunks each: those of 4 are 6 and 7
    coordinator.put_out(key(4), "lost", 1.0)
    ballot = coordinator.ballot
    assert ballot is not None
    empty = [b""] * 8
    got_one = [*empty[:6], digest("g"), b""]
    survey_answer(coordinator, 1, have_of(ballot, empty))
    survey_answer(coordinator, 2, have_of(ballot, got_one))
    sources = the(survey_answer(coordinator, 3, have_of(ballot, empty)), Repair).sources
    assert sources[0] == Source(6, key(2), digest("g"))
    assert (sources[1].chunk, sources[1].digest) == (7, b"")
    assert sources[1].owner in keys(1, 2, 3)
    assert len(sources) == 2, "the chunks of living reducers stay with them"


def test_a_repair_has_who_is_relayed_reduce_nothing_and_send_only_what_nobody_else_has() -> None:
    relayed, client = replace_struct(member(2), reach=Reach.RELAYED), member(3, Role.CLIENT)
    group = [member(1), relayed, client, member(4), member(5)]
    begin = begin_of(group, chunks=18)
    empty, lost = [b""] * 18, range(begin.starts[4], 18)  # what 5 was to reduce
    one, two, *others = lost[1], lost[2], lost[0], *lost[3:]
    has_one, has_two = list(empty), list(empty)
    has_one[one] = has_two[one] = digest("x")
    has_two[two] = digest("y")
    held = {1: has_one, 2: has_two, 3: empty, 4: empty}
    haves = {key(number): have_of(begin.ballot, has) for number, has in held.items()}
    sources = {source.chunk: source for source in repaired(begin, keys(1, 2, 3, 4), haves)[0]}
    assert set(sources) == set(lost)
    assert sources[one] == Source(one, key(1), digest("x"))
    assert sources[two] == Source(two, key(2), digest("y"))
    assert {sources[chunk].owner for chunk in others} == set(keys(1, 4))


def test_a_dead_sender_costs_no_repair() -> None:
    """What a client leaves behind: its missing parts are left out by the reducers themselves."""
    gathers = Gathering(key(1), at_tip(), RULES, signer(1))
    group = [member(1), member(2), member(3, Role.CLIENT)]
    gathers.expect(group, 0.0)
    for each in group:
        gathers.join(each.key, join_of(each), b"", 0.0)
    coordinator = begun(gathers)
    coordinator.put_out(key(3), "lost", 1.0)
    survey_answer(coordinator, 1)
    assert the(survey_answer(coordinator, 2), Repair).sources == ()


def test_a_repair_goes_on_from_the_one_before() -> None:
    """Chunk 6 was given from 4 to 2 by a repair, and 7 to 3; then 3 is lost: 2 keeps 6, as it may have begun it."""
    coordinator = running(1, 2, 3, 4)
    coordinator.put_out(key(4), "lost", 1.0)
    coordinator.put_out(key(3), "lost", 1.0)
    ballot = coordinator.ballot
    assert ballot is not None
    assert coordinator.begin is not None
    before = Repair(coordinator.begin.round, Ballot(2, key(1)), (Source(6, key(2), b""), Source(7, key(3), b"")))
    survey_answer(coordinator, 1, have_of(ballot, repair=before))
    sources = {s.chunk: s for s in the(survey_answer(coordinator, 2), Repair).sources}
    assert sources[6] == Source(6, key(2), b"")  # and not 1, who would be given it anew
    assert set(sources) == {4, 5, 6, 7}
    assert all(source.owner in keys(1, 2) for source in sources.values())


def test_a_second_loss_begins_a_second_survey_and_answers_to_the_first_are_void() -> None:
    coordinator = running(1, 2, 3, 4)
    coordinator.put_out(key(4), "lost", 1.0)
    first = coordinator.ballot
    assert first is not None
    survey_answer(coordinator, 1)
    actions = coordinator.put_out(key(3), "lost", 1.0)
    assert the(actions, Survey).out == keys(4, 3)
    assert coordinator.surveyed(key(2), first, have_of(first), 1.0) == []
    assert key(2) not in coordinator.have
    survey_answer(coordinator, 1)
    assert the(survey_answer(coordinator, 2), Repair)


def test_when_nobody_is_left_it_ends() -> None:
    coordinator = running(2, 3)
    coordinator.put_out(key(2), "lost", 1.0)
    coordinator.put_out(key(3), "lost", 1.0)
    assert coordinator.phase is Phase.ABORTED
    assert coordinator.put_out(key(2), "lost", 1.0) == []


# -- answers that can't be true

DAMAGED: list[tuple[str, dict[str, Any]]] = [
    ("a repair of another round", {"repair": Repair(b"r" * 16, Ballot(1, key(1)), ())}),
    ("of chunks that do not exist", {"repair": Repair(b"", Ballot(1, key(1)), (Source(8, key(2), b""),))}),
    ("it followed attempt 2,", {"repair": Repair(b"", Ballot(2, key(1)), ())}),
    ("it followed attempt 2,", {"done": Ballot(2, key(1))}),
    (f"it followed attempt {1 << 50},", {"done": Ballot(1 << 50, key(9))}),
    ("it followed attempt 0,", {"done": Ballot(0, key(1))}),
    ("it listed 7 chunks of 8", {"digests": ALL[:7]}),
    ("it listed 9 chunks of 8", {"digests": [*ALL, digest("i")]}),
    ("it has a commit of another round", {"commit": Commit(TIP, b"r" * 16, digest("z"), 4.0, keys(1), GROUP)}),
]


@pytest.mark.parametrize(("reason", "damage"), DAMAGED)
def test_who_answers_what_cannot_be_is_put_out_and_decides_nothing(reason: str, damage: dict[str, Any]) -> None:
    coordinator = running(1, 2, 3, 4)
    coordinator.put_out(key(4), "lost", 1.0)
    ballot, begin = coordinator.ballot, coordinator.begin
    assert ballot is not None
    assert begin is not None
    if "repair" in damage and not damage["repair"].round:
        damage = {"repair": replace_struct(damage["repair"], round=begin.round)}
    survey_answer(coordinator, 1, have_of(ballot, ALL, done=Ballot(1, key(1))))
    survey_answer(coordinator, 2, have_of(ballot, ALL, done=Ballot(1, key(1))))
    answer = replace_struct(have_of(ballot, [digest("E")] * 8), **damage)
    actions = survey_answer(coordinator, 3, answer)
    assert told(actions, Abort) == {key(3)}
    assert reason in the(actions, Abort).reason
    assert told(actions, Survey) == set(keys(1, 2))
    ballot = coordinator.ballot
    assert ballot is not None
    survey_answer(coordinator, 1, have_of(ballot, ALL, done=Ballot(1, key(1))))
    repair = the(survey_answer(coordinator, 2, have_of(ballot, ALL, done=Ballot(1, key(1)))), Repair)
    assert {source.digest for source in repair.sources} <= set(ALL)


def test_who_was_done_with_something_else_than_it_holds_is_put_out() -> None:
    coordinator = running(1, 2, 3)
    for number, root in ((1, ROOT), (2, ROOT), (3, digest("x"))):
        actions = done(coordinator, number, root)
    ballot = the(actions, Survey).ballot
    complete = Ballot(1, key(1))
    actions = survey_answer(coordinator, 3, have_of(ballot, ALL, done=complete))
    assert told(actions, Abort) == {key(3)}
    for number in (1, 2):
        assert coordinator.ballot is not None
        actions = survey_answer(coordinator, number, have_of(coordinator.ballot, ALL, done=complete))
    assert all(source.owner in keys(1, 2) for source in the(actions, Repair).sources)
    done(coordinator, 1)
    assert the(done(coordinator, 2), Commit).root == ROOT


def test_who_does_not_follow_a_repair_is_put_out() -> None:
    """It holds what it says, but never fetches what the repair names: else they would repair without end."""
    coordinator = running(1, 2, 3)
    lied = [digest("x"), *ALL[1:]]
    for number, root in ((1, ROOT), (2, ROOT), (3, root_of(lied))):
        done(coordinator, number, root)
    for number, digests in ((1, ALL), (2, ALL), (3, lied)):
        assert coordinator.ballot is not None
        actions = survey_answer(coordinator, number, have_of(coordinator.ballot, digests, done=Ballot(1, key(1))))
    assert len(the(actions, Repair).sources) == 1
    actions = done(coordinator, 3, root_of(lied))
    assert told(actions, Abort) == {key(3)}
    assert told(actions, Survey) == set(keys(1, 2))


def test_strangers_that_an_answer_names_as_out_change_nothing() -> None:
    coordinator = running(1, 2, 3)
    coordinator.put_out(key(3), "lost", 1.0)
    ballot = coordinator.ballot
    assert ballot is not None
    survey_answer(coordinator, 1)
    assert the(survey_answer(coordinator, 2, have_of(ballot, out=keys(3, 7))), Repair)
    assert set(coordinator.out) == {key(3)}


def test_a_round_ends_when_all_are_said_to_be_out() -> None:
    coordinator = running(1, 2)
    coordinator.put_out(key(2), "lost", 1.0)
    ballot = coordinator.ballot
    assert ballot is not None
    actions = survey_answer(coordinator, 1, have_of(ballot, out=keys(1, 2)))
    assert coordinator.phase is Phase.ABORTED
    assert told(actions, Abort) == {key(1)}


# -- a successor and its predecessor

BEGIN = begin_of(GROUP, coordinator=4)


def taking_over(begin: Begin = BEGIN, attempt: int = 1, lost: tuple[bytes, ...] = keys(4), me: int = 1) -> Leading:
    """That peer takes over from peer 4."""
    at = at_tip(tip=begin.tip)
    at.ballot = Ballot(attempt, key(4))
    before = Gathering(key(me), at, RULES, signer(me), phase=Until.OVER)
    exchange = Digests(Book(key(me), begin, chunks_of(begin)), lambda *_: None)
    round = InRound(begin, exchange, {}, 0.0, Witnesses(key(me)))
    return Leading.after(before, round, dict.fromkeys(lost, "lost"), ())


def successor(attempt: int = 1, lost: tuple[bytes, ...] = keys(4)) -> tuple[Leading, Survey]:
    """Peer 1 takes over from peer 4; returns what it asks, too."""
    coordinator = taking_over(attempt=attempt, lost=lost)
    [action] = coordinator.start_survey(1.0)
    assert isinstance(action.message, Survey)
    assert action.to == tuple(coordinator.live())
    return coordinator, action.message


def test_a_successor_asks_first_under_a_higher_ballot_and_brings_the_begin() -> None:
    coordinator, survey = successor(attempt=5)
    assert survey.ballot == Ballot(6, key(1))
    assert survey.begin == BEGIN, "it may not have reached everybody"
    assert survey.out == keys(4)
    assert coordinator.wake_at() == 61.0
    assert done(coordinator, 1) == done(coordinator, 2) == done(coordinator, 3) == []
    assert coordinator.phase is Phase.SURVEYING, "it decided before it had asked"


def test_a_successor_goes_by_the_time_of_the_one_that_began_the_round() -> None:
    begin = msgspec.structs.replace(BEGIN, timeout=7.0)
    coordinator = taking_over(begin)
    coordinator.start_survey(1.0)
    assert coordinator.wake_at() == 8.0
    assert the(coordinator.tick(8.0), Abort).reason == "the round has made no progress for 7 s"


def test_a_commit_that_the_dead_one_sent_to_a_single_member_is_the_decision() -> None:
    coordinator, survey = successor()
    commit = Commit(TIP, BEGIN.round, digest("z"), 4.0, keys(1, 2, 3, 4), GROUP)
    survey_answer(coordinator, 1, have_of(survey.ballot, ALL, done=Ballot(1, key(4))))
    actions = survey_answer(coordinator, 2, Have(survey.ballot, (), None, (), None, commit))
    assert [action.message for action in actions] == [commit], "passed on as it is"
    assert set(actions[0].to) == set(keys(1, 2, 3, 4))
    assert coordinator.phase is Phase.COMMITTED


def test_what_one_was_complete_with_under_the_highest_ballot_is_the_decision() -> None:
    """The dead one may have committed it and told nobody who lives."""
    coordinator, survey = successor(attempt=3)
    old = [digest(letter) for letter in "ABCDEFGH"]
    survey_answer(coordinator, 1, have_of(survey.ballot, old, done=Ballot(1, key(4))))
    survey_answer(coordinator, 3, have_of(survey.ballot, old, done=Ballot(1, key(4))))
    sources = the(survey_answer(coordinator, 2, have_of(survey.ballot, ALL, done=Ballot(2, key(4)))), Repair).sources
    assert sources == tuple(Source(chunk, key(2), ALL[chunk]) for chunk in range(8))


def test_an_auxiliary_that_was_complete_has_no_say_in_the_result() -> None:
    begin = begin_of([member(1), member(2, Role.AUXILIARY), member(3), member(4)], coordinator=4)
    coordinator = taking_over(begin)
    ballot = the(coordinator.start_survey(1.0), Survey).ballot
    survey_answer(coordinator, 1, have_of(ballot, ALL))
    survey_answer(coordinator, 2, have_of(ballot, (), done=Ballot(1, key(4))))
    sources = the(survey_answer(coordinator, 3, have_of(ballot, ALL)), Repair).sources
    assert {source.chunk: source.digest for source in sources} == {n: ALL[n] for n in range(*begin.starts[3:])}


def test_whom_an_earlier_coordinator_put_out_stays_out() -> None:
    coordinator, survey = successor()
    survey_answer(coordinator, 1, have_of(survey.ballot, out=keys(3, 4)))
    survey_answer(coordinator, 2, have_of(survey.ballot, out=keys(3, 4)))
    again = the(survey_answer(coordinator, 3, have_of(survey.ballot)), Survey)
    assert set(again.out) == set(keys(3, 4))
    assert again.ballot > survey.ballot
    assert coordinator.live() == list(keys(1, 2))


def two_sides_that_put_each_other_out(
    done: dict[int, Ballot], last: Role = Role.NODE
) -> tuple[Leading, list[Send | Ask]]:
    """Peer 1 takes over, and all four answer: two that were told that the others are out, and these, that were told the
    same of the two. Some were `done`."""
    coordinator = taking_over(begin_of([*members(1, 2, 3), member(4, last)], coordinator=5), attempt=3, lost=())
    ballot, actions = the(coordinator.start_survey(1.0), Survey).ballot, []
    for number, role in zip((1, 2, 3, 4), (*[Role.NODE] * 3, last), strict=True):
        digests = () if role is Role.AUXILIARY else ALL if number in done else [b""] * 8
        out = keys(3, 4) if number < 3 else keys(1, 2)
        actions = survey_answer(coordinator, number, have_of(ballot, digests, done=done.get(number), out=out))
    return coordinator, actions


@pytest.mark.parametrize(
    ("done", "last"),
    [({}, Role.NODE), ({4: Ballot(1, key(5))}, Role.AUXILIARY)],
    ids=["none was done", "an auxiliary was, which holds nothing"],
)
def test_if_two_sides_have_put_each_other_out_all_hear_of_the_end(done: dict[int, Ballot], last: Role) -> None:
    """Nobody heard of it: the successor stayed in the round, and took it over again, for ever."""
    coordinator, actions = two_sides_that_put_each_other_out(done, last)
    assert coordinator.phase is Phase.ABORTED
    assert told(actions, Abort) == set(keys(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("done", "stay"),
    [
        ({4: Ballot(1, key(5))}, (4,)),
        ({1: Ballot(1, key(5)), 3: Ballot(2, key(4)), 4: Ballot(2, key(4))}, (3, 4)),
        ({2: Ballot(3, key(1)), 3: Ballot(2, key(4)), 4: Ballot(2, key(4))}, (2,)),
    ],
)
def test_if_two_sides_have_put_each_other_out_the_last_that_were_done_decide(
    done: dict[int, Ballot], stay: tuple[int, ...]
) -> None:
    """The coordinator that they followed may have committed, and told nobody who answers."""
    _, actions = two_sides_that_put_each_other_out(done)
    assert told(actions, Survey) == set(keys(*stay))
    assert told(actions, Abort) == set()


def test_a_higher_ballot_of_one_that_lives_is_given_way_to() -> None:
    coordinator, _ = successor()
    assert coordinator.outbid(key(2), Ballot(9, key(2)), True, 2.0) == []
    assert coordinator.phase is Phase.ABORTED
    assert survey_answer(coordinator, 1) == survey_answer(coordinator, 2) == survey_answer(coordinator, 3) == []


def test_a_higher_ballot_of_one_that_is_lost_is_outbid() -> None:
    coordinator, survey = successor()
    assert coordinator.outbid(key(2), survey.ballot, False, 2.0) == [], "it is its own"
    assert coordinator.outbid(key(2), Ballot(1, key(3)), True, 2.0) == []
    higher = the(coordinator.outbid(key(2), Ballot(9, key(4)), False, 2.0), Survey)
    assert higher.ballot == Ballot(10, key(1))


def test_two_that_take_over_do_not_both_commit() -> None:
    """1 and 2 both believe that 4 is lost. 3 answers both, and says DONE only under the ballot that it follows."""
    one, first = successor()
    two = taking_over(me=2)
    second = the(two.start_survey(1.0), Survey)
    assert second.ballot > first.ballot
    for number in (1, 2, 3):
        survey_answer(one, number)
        survey_answer(two, number)
    done(one, 1)
    for number in (2, 3):
        assert done(one, number, ballot=second.ballot) == [], "a DONE to the other was counted"
        done(two, number)
    assert one.phase is Phase.RUNNING
    assert the(done(two, 1), Commit)


def test_a_coordinator_that_was_replaced_can_commit_no_more() -> None:
    old = running(1, 2, 3)
    done(old, 1)
    # 2 and 3 have followed a successor: their DONEs are under its ballot.
    for number, ballot in itertools.product((2, 3), (Ballot(2, key(2)), Ballot(3, key(2)))):
        assert done(old, number, ballot=ballot) == []
    assert old.phase is Phase.RUNNING


@pytest.mark.parametrize("lost", [keys(4), keys(3, 4), keys(2, 3, 4)])
def test_a_successor_goes_on_with_those_that_live(lost: tuple[bytes, ...]) -> None:
    coordinator, survey = successor(lost=lost)
    live: list[Member] = [m for m in GROUP if m.key not in lost]
    actions: list[Send | Ask] = []
    for each in live:
        actions = coordinator.surveyed(each.key, survey.ballot, have_of(survey.ballot), 1.0)
    assert {s.chunk for s in the(actions, Repair).sources} == set(range(8 - 2 * len(lost), 8))
    for each in live:
        actions = coordinator.finished(each.key, Done(BEGIN.round, survey.ballot, ROOT), GROUP, 2.0)
    assert the(actions, Commit).view == tuple(live)


# -- a group that was left


PAIRS = replace(RULES, min_group=2, target_group=2)


def test_a_group_that_is_left_by_all_but_one_regroups_with_those_who_wait():
    coordinator = running(1, 2, rules=PAIRS)
    assert join(coordinator, 3) == []
    [told, end] = coordinator.put_out(key(2), "it gave up", 1.0)
    assert told.to == keys(2)
    assert end.to == keys(1, 3)
    assert isinstance(end.message, Abort)
    assert "join again" in end.message.reason
    assert coordinator.phase is Phase.ABORTED


def test_who_joined_and_was_not_chosen_hears_of_the_end():
    gathers = gathering(1, 2, 3, rules=PAIRS, settled_at=5.0)
    for number in (2, 3):
        gathers.joins[key(number)] = join_of(member(number))
    join(gathers, 1)
    coordinator = begun(gathers)
    assert [m.key for m in coordinator.begin.members] == list(keys(2, 3))
    coordinator.put_out(key(2), "it gave up", 1.0)
    assert coordinator.phase is Phase.ABORTED, "another may take its place"


def test_who_joins_a_group_that_was_left_by_all_but_one_is_not_kept_waiting():
    coordinator = running(1, 2, rules=PAIRS)
    coordinator.put_out(key(2), "it gave up", 1.0)
    assert coordinator.phase is Phase.SURVEYING, "as long as nobody else is there, the round goes on"
    [end] = join(coordinator, 3)
    assert end.to == keys(1, 3)
    assert isinstance(end.message, Abort)


def test_who_waits_no_longer_makes_up_for_nobody():
    coordinator = running(1, 2, rules=PAIRS)
    join(coordinator, 3)
    assert coordinator.unjoin(key(3), 0.5) == []
    coordinator.put_out(key(2), "it gave up", 1.0)
    assert coordinator.phase is Phase.SURVEYING


def test_a_round_that_counts_samples_goes_on_with_one():
    rules = replace(RULES, min_group=2, target_samples=32)
    gathers = gathering(1, 2, rules=rules)
    for number in (1, 2):
        gathers.progress(key(number), Progress(TIP, 16.0, 1.0), 0.0)
        join(gathers, number)
    coordinator = begun(gathers)
    join(coordinator, 3)
    coordinator.put_out(key(2), "lost", 1.0)
    assert coordinator.phase is Phase.SURVEYING
