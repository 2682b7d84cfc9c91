"""Peers that are missing are dialled for as long as they are, every 5 to 60 s."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shoal.p2p.identity import PeerID
from shoal.p2p.redial import Redial

ONE, OTHER = PeerID(b"1" * 32), PeerID(b"2" * 32)


def dials(redial: Redial, until: float) -> list[float]:
    """When it dials, if nobody is found."""
    times: list[float] = []
    while (when := redial.next_time()) is not None and when <= until:
        assert redial.due(when) == [ONE]
        times.append(when)
    return times


@pytest.mark.parametrize("at_once", [False, True])
def test_the_longer_it_is_missing_the_less_often(at_once: bool) -> None:
    redial = Redial(random.Random(1))
    redial.missing(ONE, 100.0, at_once=at_once)
    times = dials(redial, 3700.0)
    assert times[0] == 100.0 if at_once else 101.0 <= times[0] <= 101.2
    intervals = [later - earlier for earlier, later in pairwise(times)]
    assert all(5.0 <= interval <= 60.0 for interval in intervals)
    assert max(intervals[:3]) <= 6.0
    assert intervals[-20:] == [60.0] * 20
    missed = [later - earlier for earlier, later in pairwise(times) if earlier >= 130.0]
    for when, interval in zip(times[-len(missed) - 1 :], missed, strict=False):
        assert interval <= max(6.0, 0.3 * (when - 100.0)) + 1e-9


def test_it_ends_when_the_peer_is_found_and_begins_anew_when_it_is_lost_again() -> None:
    redial = Redial(random.Random(1))
    redial.missing(ONE, 0.0)
    dials(redial, 1000.0)
    redial.found(ONE)
    assert redial.next_time() is None
    assert redial.due(1e9) == []
    redial.missing(ONE, 2000.0)
    assert 2001.0 <= dials(redial, 2100.0)[0] <= 2001.2


def test_to_hurry_is_for_those_who_are_missing() -> None:
    redial = Redial(random.Random(1))
    redial.missing(ONE, 0.0)
    redial.due(1000.0)
    redial.missing(ONE, 1000.0)  # known already: nothing begins anew
    redial.hurry(ONE, 1001.0)
    redial.hurry(OTHER, 1001.0)
    assert redial.due(1001.0) == [ONE]
    assert redial.due(1001.0) == []
