"""Which rounds average the state, and of what they consist."""

from __future__ import annotations

import msgspec
import pytest

from shoal.swarm.protocol.messages import Join
from shoal.swarm.protocol.rules import Rules
from tests.swarm.rounds import digest, join_of, member

RULES = Rules(sizes=(64,), matchmaking_time=1.0, round_timeout=1.0, due_sizes=(8,), state_sizes=(16, 32))


def joins(*told: tuple[str, str]) -> list[Join]:
    """(machine, letter of its state's digest) of each."""
    return [
        msgspec.structs.replace(join_of(member(number)), machine=machine, state=digest(letter) if letter else b"")
        for number, (machine, letter) in enumerate(told, 1)
    ]


@pytest.mark.parametrize(
    ("told", "averaged"),
    [
        ([("A", "x"), ("A", "x")], False),
        ([("A", "x"), ("B", "x")], False),
        ([("A", "x"), ("B", "y")], True),
        ([("A", "x"), ("A", "y")], False),  # alike, so one has a fault: it downloads
        ([("A", "x"), ("A", "x"), ("A", "y"), ("B", "x")], False),
        ([("A", "x"), ("A", "x"), ("A", "y"), ("B", "z")], True),
        ([("A", "x"), ("B", "")], False),  # one that holds no state
        ([], False),
    ],
)
def test_unlike_machines_with_unlike_states(told: list[tuple[str, str]], averaged: bool) -> None:
    assert RULES.averages_state(3, joins(*told)) is averaged
    assert not RULES.averages_state(0, joins(*told)), "at the start of a run the state of the most is downloaded"
    every = changed(RULES, state_every=4)
    assert every.averages_state(3, joins(*told)) is averaged
    assert not every.averages_state(4, joins(*told))
    always = changed(RULES, state_always=True, state_every=2)
    assert [always.averages_state(epoch, joins(*told)) for epoch in range(4)] == [False, True, False, True]


def changed(rules: Rules, **changes: object) -> Rules:
    values = {name: getattr(rules, name) for name in Rules.__dataclass_fields__} | changes
    return Rules(**values)


def test_of_what_the_vector_consists() -> None:
    assert RULES.vector(0, False) == (64, 8)
    assert RULES.vector(0, True) == (64, 8, 16, 32)
    every = changed(RULES, state_every=2)
    assert every.vector(0, False) == (64,)
    assert every.vector(1, False) == (64, 8)
    assert not every.may_average_state(2)
    assert every.may_average_state(3)


VOTES: list[tuple[list[tuple[bytes, float]], bytes]] = [
    ([], b""),
    ([(b"", 5.0)], b""),  # an auxiliary
    ([(b"a", 1.0), (b"", 9.0)], b"a"),
    ([(b"a", 1.0), (b"a", 1.0), (b"b", 9.0)], b"a"),
    ([(b"b", 9.0), (b"a", 1.0), (b"a", 1.0)], b"a"),
    ([(b"a", 1.0), (b"b", 2.0)], b"b"),
    ([(b"a", 2.0), (b"b", 1.0)], b"a"),
    ([(b"a", 2.0), (b"b", 1.0), (b"a", 1.0), (b"b", 1.0)], b"a"),
    ([(b"a", 2.0), (b"b", 1.5), (b"a", 1.0), (b"b", 1.75)], b"b"),
    ([(b"a", 1.0), (b"b", 1.0)], b"b"),  # whoever coordinates decides alike
    ([(b"b", 1.0), (b"a", 1.0)], b"b"),
    ([(b"a", 0.0)], b"a"),  # one that has overflowed makes the step as well
]


@pytest.mark.parametrize(("told", "chosen"), VOTES)
def test_the_options_that_most_hold(told: list[tuple[bytes, float]], chosen: bytes) -> None:
    asked = [
        msgspec.structs.replace(join_of(member(number), weight=weight), options=options)
        for number, (options, weight) in enumerate(told, 1)
    ]
    assert RULES.options(asked) == chosen


def test_options_that_the_coordinator_cannot_use_lose_a_tie_and_no_majority() -> None:
    """If its own kind of options won against most members, it would end their round."""
    rules = changed(RULES, options_fit=lambda options: options != b"unlike mine")
    asked = [msgspec.structs.replace(join_of(member(n), weight=9.0), options=b"unlike mine") for n in (1, 2)]
    asked.append(msgspec.structs.replace(join_of(member(3), weight=1.0), options=b"mine"))
    assert rules.options(asked[1:]) == b"mine"
    assert rules.options(asked) == b"unlike mine"


@pytest.mark.parametrize(
    ("group", "share", "last", "least"),
    [(1, 0.0, 9, 1), (3, 0.0, 9, 3), (1, 0.5, 9, 5), (1, 0.6, 5, 3), (1, 0.1, 30, 3), (1, 1.0, 4, 4), (1, 0.6, 0, 1)],
)
def test_of_how_many_members_a_round_is_at_least(group: int, share: float, last: int, least: int) -> None:
    assert changed(RULES, min_group=group, min_share=share).least(last) == least
