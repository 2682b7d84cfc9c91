"""Many schedules of one round, each drawn from a seed: what is delivered when, who dies, which link breaks. A tip gets
one result in all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from shoal.swarm.protocol.leading import Leading
from shoal.swarm.protocol.messages import Survey
from tests.simulation.swarms import seeds
from tests.swarm.rounds import RULES, keys, member
from tests.swarm.wire import Request, Wire

PATIENT = replace(RULES, round_timeout=86400.0)
SCHEDULES = 60  # of each seed


Event = Callable[[Wire, random.Random], bool]


def drawn(rng: random.Random, parts: bool, also: Sequence[Event] = ()) -> Wire:
    """One schedule, in which these events happen, too. A kill hits the coordinator half of the time, and comes late:
    most of the messages that decide are the last ones of a round."""
    count = rng.randint(3, 5)
    wire = Wire([member(number) for number in range(1, count + 1)], PATIENT)
    keys = list(wire.peers)
    for each in keys:
        wire.offer(each)
    length = rng.randint(1, 12 * count * count)
    faults = sorted(rng.randint(length // 2, length) for _ in range(rng.randint(1, count - 1)))
    favoured: bytes | None = None
    for step in range(4000):
        while faults and faults[0] <= step:
            faults.pop(0)
            if not (also and rng.random() < 0.5 and rng.choice(also)(wire, rng)):
                fault(wire, rng, parts)
        ways, unnoticed = wire.waiting(), wire.unnoticed()
        if ways and (not unnoticed or rng.random() < 0.9):
            if favoured is None or rng.random() < 0.1:
                favoured = rng.choice(keys)
            mine = [way for way in ways if way[0] == favoured]
            wire.deliver(rng.choice(mine if mine and rng.random() < 0.7 else ways))
        elif unnoticed:
            wire.notice(*rng.choice(unnoticed))
        elif wire.now > 6.0:
            break
        else:
            wire.pass_time(0.6)
    return wire


def fault(wire: Wire, rng: random.Random, parts: bool) -> None:
    """A peer dies, or a link breaks; one peer stays that all reach."""
    _hub, *others = wire.peers
    others = [key for key in others if key not in wire.dead]
    leads = [key for key in others if wire.peers[key].gathering or wire.peers[key].leading]
    if parts and len(others) > 1 and rng.random() < 0.6:
        wire.cut_link(*rng.sample(others, 2))
    elif others:
        wire.kill(rng.choice(leads if leads and rng.random() < 0.5 else others), rng.randint(0, 6))


def check(wire: Wire, parts: bool, number: int) -> None:
    results = {result for results in wire.results.values() for result in results}
    assert len(results) <= 1, f"one tip has two results in schedule {number}"
    if not parts:
        living = wire.living
        assert not any(wire.peers[key].participant.begin for key in living), f"schedule {number} does not end"
        heard = [bool(wire.results[key]) for key in living]
        assert all(heard) or not any(heard), f"a living peer has not heard of the result in schedule {number}"


def leads_of(wire: Wire) -> list[tuple[bytes, Leading]]:
    """The peers that live and coordinate a round, and how."""
    leads = [(key, wire.peers[key].lead) for key in wire.living]
    return [(key, lead) for key, lead in leads if isinstance(lead, Leading)]


def end_a_round(wire: Wire, rng: random.Random) -> bool:
    """A coordinator ends the round that it has begun, if there is one. (A successor does not, once it knows what the
    one before may have decided.)"""
    leading = [(key, lead) for key, lead in leads_of(wire) if not lead.took_over]
    if leading:
        key, lead = rng.choice(leading)
        wire.peers[key].out.extend(lead.abort("it has not got on"))
        wire.act(key)
    return bool(leading)


def put_out(wire: Wire, rng: random.Random) -> bool:
    """A coordinator puts a member out that is there."""
    choices = [(key, lead, member) for key, lead in leads_of(wire) for member in lead.live() if member != key]
    if choices:
        key, lead, member = rng.choice(choices)
        wire.peers[key].out.extend(lead.put_out(member, "it is slow", wire.now))
        wire.act(key)
    return bool(choices)


def give_up(wire: Wire, rng: random.Random) -> bool:
    """A trainer has waited too long for the result of a round, and joins again."""
    members = [key for key in wire.living if wire.peers[key].participant.begin is not None]
    if members:
        key = rng.choice(members)
        wire.peers[key].participant.withdraw()
        wire.act(key)
        wire.offer(key)
    return bool(members)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("parts", [False, True])
def test_one_tip_has_one_result(seed: int, parts: bool) -> None:
    for number in range(SCHEDULES):
        check(drawn(random.Random(f"{seed} {number}"), parts), parts, number)


@pytest.mark.parametrize("seed", seeds(10))
def test_one_tip_has_one_result_though_coordinators_end_rounds(seed: int) -> None:
    for number in range(SCHEDULES):
        check(drawn(random.Random(f"{seed} {number}"), False, [end_a_round]), False, number)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("events", [[put_out], [put_out, give_up, end_a_round]], ids=["put out", "also gives up"])
def test_one_tip_has_one_result_though_members_leave_rounds(seed: int, events: Sequence[Event]) -> None:
    for number in range(SCHEDULES):
        check(drawn(random.Random(f"{seed} {number}"), False, events), False, number)


@pytest.mark.parametrize(("seed", "number"), [(100, 39), (176, 48)])
def test_a_successor_that_gives_up_leaves_the_round_to_the_next(seed: int, number: int) -> None:
    """It had given way, and was in the round no more: it began another one, or the others waited for it."""
    check(drawn(random.Random(f"{seed} {number}"), False, [give_up]), False, number)


@pytest.mark.parametrize(("seed", "number"), [(5, 27), (11, 26), (37, 40), (38, 54), (44, 36)])
def test_what_a_member_that_was_put_out_says_undoes_no_result(seed: int, number: int) -> None:
    """The coordinator had decided, and was killed. Its successor asked one that had been put out, which had left."""
    check(drawn(random.Random(f"{seed} {number}"), False, [put_out]), False, number)


def test_who_was_put_out_does_not_say_that_the_round_has_ended() -> None:
    """The coordinator had decided, and died; so did its successor, before the others knew whom it had put out."""
    check(drawn(random.Random("393 29"), False, [put_out, give_up, end_a_round]), False, 29)


@pytest.mark.parametrize(
    ("seed", "number", "parts"),
    [
        # A successor that a member did not follow yet, since it had not noticed the loss, left the round. It then
        # began another one alone, or refused for ever to take over the one that the others were in.
        (8, 45, False),
        (24, 52, False),
        (30, 8, False),
        (34, 59, False),
        # One that had lost the coordinator of another side refused its COMMIT as that of a stranger, and made its own.
        (7, 38, True),
        (10, 40, True),
        (23, 40, True),
        # What a member that both sides reached said of those whom the first side had put out parted it from them.
        (8, 5, True),
        # One that followed a successor was taken for one that follows the coordinator which most members doubted; or
        # it did not count as many doubts as who put it out, or had not noticed yet that the coordinator was lost.
        (170, 22, True),
        (127, 16, True),
        (224, 51, True),
        (328, 9, True),
    ],
)
def test_a_schedule_that_once_broke_this(seed: int, number: int, parts: bool) -> None:
    check(drawn(random.Random(f"{seed} {number}"), parts), parts, number)


def test_a_round_whose_two_sides_have_put_each_other_out_ends() -> None:
    """They met again before any of them was done, and lost both coordinators. The next one heard that all were out,
    told nobody that the round was over, and took it over again, for ever."""
    wire = Wire([member(number) for number in range(1, 7)], PATIENT)
    for each in wire.peers:
        wire.offer(each)
    while not all(peer.participant.begin is not None for peer in wire.peers.values()):
        wire.deliver(wire.waiting()[0])
    for one, other in itertools.product(keys(1, 2, 3), keys(4, 5, 6)):
        wire.cut_link(one, other)
    while unnoticed := wire.unnoticed():
        wire.notice(*unnoticed[0])
    while surveys := [way for way in wire.waiting() if any(map(is_survey, wire.ways[way]))]:
        wire.deliver(surveys[0])
    rounds = [peer.participant.round for peer in wire.peers.values()]
    assert all(round is not None and len(round.exchange.book.out) == 3 and not round.done for round in rounds)
    leads = leads_of(wire)
    assert len(leads) == 2
    wire.heal()
    for key, _ in leads:
        wire.kill(key, 0)
    for step in range(4000):
        if ways := wire.waiting():
            wire.deliver(ways[step * 7919 % len(ways)])
        elif unnoticed := wire.unnoticed():
            wire.notice(*unnoticed[0])
        elif wire.now < 6.0:
            wire.pass_time(0.6)
    check(wire, False, 0)


def is_survey(message: object) -> bool:
    return isinstance(message, Request) and isinstance(message.message, Survey)
