"""For how many samples a member counts."""

from __future__ import annotations

import math

from shoal.swarm.protocol.history import History
from tests.swarm.rounds import key, keys

TARGET = 100.0


def history(*commits: dict[bytes, float]) -> History:
    """One commit every 10 s."""
    made = History()
    for number, weights in enumerate(commits, 1):
        made.committed(weights, 10.0 * number)
    return made


def test_nothing_is_known_before_two_commits() -> None:
    for made in (history(), history({key(1): 5.0, key(2): 5.0})):
        assert made.most(key(1), TARGET, 20.0) == math.inf


def test_a_member_counts_for_twice_its_largest_share() -> None:
    shares = [{key(1): 10.0, key(2): 90.0}, {key(1): 20.0, key(2): 80.0}, {key(1): 15.0, key(2): 85.0}]
    made = history(*shares)
    assert made.most(key(1), TARGET, 30.0) == 50.0, "at least that of one that was idle: a half of its equal share"
    assert made.most(key(2), TARGET, 30.0) == 180.0


def test_who_has_just_come_may_be_as_fast_as_the_fastest() -> None:
    made = history(*[{key(n): 25.0 for n in (1, 2, 3, 4)}] * 3)
    assert made.most(key(9), TARGET, 30.0) == 50.0


def test_more_counts_as_the_epoch_takes_longer() -> None:
    """Three of four that brought as much are idle: the last one calls the round all the same."""
    made = history(*[dict.fromkeys(keys(1, 2, 3, 4), 25.0)] * 3)
    assert made.most(key(1), TARGET, 30.0 + 10.0) == 50.0
    assert made.most(key(1), TARGET, 30.0 + 40.0) == 200.0, "it has brought the target by then"


def test_one_that_was_idle_counts_too() -> None:
    made = history(*[{key(1): 100.0, key(2): 0.0}] * 3)
    assert made.most(key(2), TARGET, 30.0) == 50.0


def test_a_state_that_came_otherwise_forgets_it() -> None:
    made = history(*[{key(1): 100.0}] * 3)
    made.skipped()
    assert made.most(key(1), TARGET, 30.0) == math.inf
    assert not made.last


def test_a_round_to_which_nobody_brought_anything_says_nothing() -> None:
    made = history({key(1): 0.0}, {key(1): 0.0}, {key(1): 0.0})
    assert made.most(key(1), TARGET, 30.0) == math.inf
