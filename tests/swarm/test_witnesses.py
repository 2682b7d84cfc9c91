"""A round gets on if two of its members say so."""

from __future__ import annotations

from shoal.swarm.protocol.witnesses import Witnesses
from tests.swarm.rounds import key


def test_what_one_says_alone_counts_for_nothing() -> None:
    witnesses = Witnesses(key(1))
    assert not any(witnesses.say(key(2), signs, now=float(signs)) for signs in range(100))


def test_two_are_believed_and_the_first_answer_is_no_news() -> None:
    witnesses = Witnesses(key(1))
    assert not witnesses.say(key(2), 7, now=0.0)
    assert not witnesses.say(key(3), 9, now=0.0)
    assert not witnesses.say(key(2), 8, now=1.0)
    assert witnesses.say(key(3), 10, now=2.0)
    assert witnesses.say(key(2), 9, now=3.0)
    assert not witnesses.say(key(2), 10, now=20.0), "the other has said nothing new for long"


def test_who_says_the_same_again_testifies_to_nothing() -> None:
    witnesses = Witnesses(key(1))
    for second in range(5):
        witnesses.say(key(2), 1, now=float(second))
        assert not witnesses.say(key(3), second, now=float(second))


def test_this_peer_and_who_stands_alone_need_no_witness() -> None:
    witnesses = Witnesses(key(1))
    witnesses.say(key(1), 0, now=0.0)
    assert witnesses.say(key(1), 1, now=1.0)
    other = Witnesses(key(1))
    other.say(key(2), 0, now=0.0, alone=True)
    assert other.say(key(2), 1, now=1.0, alone=True)
