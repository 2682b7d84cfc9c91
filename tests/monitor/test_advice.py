"""What follows from where the time of an epoch goes."""

from __future__ import annotations

import pytest

from shoal.monitor.advice import advice_of
from shoal.monitor.snapshot import Phases


def phases(**seconds: float) -> Phases:
    return Phases(**({"computing": 1.0, "waiting": 0.1, "matchmaking": 0.1, "exchange": 0.1, "step": 0.1} | seconds))


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"computing": 8.0}, "95% of an epoch is computing: more peers make more epochs."),
        ({"exchange": 2.0}, "61% of an epoch goes into bytes, 25.0 MB from each peer: send fewer (grad_compression"),
        ({"waiting": 2.0}, "61% of an epoch is waiting for the samples of others"),
        ({"matchmaking": 2.0}, "61% of an epoch is waiting for all to join the round"),
        ({"step": 2.0}, "61% of an epoch is the optimizer's step: step in the background (delay_optimizer_step)"),
    ],
)
def test_the_largest_part_is_named_with_what_makes_it_smaller(seconds: dict[str, float], says: str) -> None:
    assert advice_of(phases(**seconds), 25e6, 4).startswith(says)


def test_only_many_peers_are_advised_to_be_fewer() -> None:
    assert "clients" not in advice_of(phases(matchmaking=2.0), 1e6, 16)
    assert "some of the 40 peers as clients" in advice_of(phases(matchmaking=2.0), 1e6, 40)


def test_of_no_time_nothing_follows() -> None:
    assert advice_of(Phases(0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 1) == ""
