"""How long a peer may be silent."""

from __future__ import annotations

import pytest

from shoal.swarm.protocol.promptness import (
    EPOCHS,
    FACTOR,
    KNOWN,
    LATEST,
    LEAST_SECONDS,
    MAX_KEPT,
    UNKNOWN_SECONDS,
    Promptness,
)

A, B = b"a" * 32, b"b" * 32
MOST = 15.0


def test_whoever_answers_within_milliseconds_is_given_little_time() -> None:
    promptness = Promptness(MOST)
    limits = []
    for epoch in range(4):
        limits.append(promptness.limit(A, 0.0))
        assert promptness.knows(A) == (epoch >= KNOWN)
        promptness.answered(A, 0.002, epoch)
    assert limits == [UNKNOWN_SECONDS, UNKNOWN_SECONDS / 2, UNKNOWN_SECONDS / 4, LEAST_SECONDS + FACTOR * 0.002]
    assert promptness.limit(B, 0.0) == UNKNOWN_SECONDS, "of another, nothing is known"


@pytest.mark.parametrize("says", [False, True])
def test_whoever_answers_late_or_says_that_it_may_is_given_more_for_200_epochs(says: bool) -> None:
    promptness = Promptness(MOST)
    for epoch in range(4):
        promptness.answered(A, 0.002, epoch)
    seconds = 2.0 if says else 0.5
    (promptness.may_be_late if says else promptness.answered)(A, seconds, 4)
    for epoch in range(5, 4 + EPOCHS):
        promptness.answered(A, 0.002, epoch)
        assert promptness.limit(A, 0.0) == LEAST_SECONDS + FACTOR * seconds
    promptness.answered(A, 0.002, 4 + EPOCHS)
    assert promptness.limit(A, 0.0) == LEAST_SECONDS + FACTOR * 0.002


@pytest.mark.parametrize("seconds", [100.0, 1e9])
def test_nobody_is_given_more_than_the_most(seconds: float) -> None:
    promptness = Promptness(MOST)
    promptness.may_be_late(A, seconds, 0)
    assert promptness.limit(A, 0.0) == promptness.limit(B, seconds) == MOST


def test_an_answer_that_comes_over_a_line_that_was_cut_says_little_about_the_peer() -> None:
    promptness = Promptness(MOST)
    for seconds in (0.002, 0.002, 0.002, 12.0):
        promptness.answered(A, seconds, 0)
    assert promptness.limit(A, 0.0) == LEAST_SECONDS + FACTOR * LATEST


def test_a_member_whose_way_back_is_long_is_waited_for() -> None:
    promptness = Promptness(MOST)
    for _ in range(4):
        promptness.answered(A, 0.002, 0)
    assert promptness.limit(A, 7.0) == 7.0


def test_only_so_many_peers_are_remembered() -> None:
    promptness = Promptness(MOST)
    for number in range(MAX_KEPT + 10):
        promptness.answered(number.to_bytes(32, "big"), 1.0, 0)
    assert promptness.limit((0).to_bytes(32, "big"), 0.0) == UNKNOWN_SECONDS
    assert promptness.limit((MAX_KEPT).to_bytes(32, "big"), 0.0) == LEAST_SECONDS + FACTOR
