"""A member whose trainer waits in another run says so: nobody waits for its samples, nor, if it joins no round, for its
JOIN."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.swarm.protocol.gathering import Gathering, Until
from shoal.swarm.protocol.messages import Presence, Progress
from tests.swarm.rounds import RULES, TIP, at_tip, join_of, key, keys, member, members, signer

EACH = replace(RULES, target_samples=8.0, target_is_each=True)
"""Inner steps are counted."""


def coordinator_of(rules: object = EACH) -> Gathering:
    made = Gathering(key(1), at_tip(), rules, signer(1), veterans=frozenset(keys(1, 2)))  # type: ignore[arg-type]
    made.expect(members(1, 2), 0.0)
    return made


def report(samples: float) -> Progress:
    return Progress(TIP, samples, 1.0)


def elsewhere(presence: Presence) -> Progress:
    return Progress(TIP, 0.0, 0.0, counted=False, presence=presence)


@pytest.mark.parametrize("presence", [Presence.LENT, Presence.AWAY])
def test_nobody_waits_for_its_inner_steps(presence: Presence) -> None:
    coordinator = coordinator_of()
    coordinator.progress(key(2), report(3.0), 1.0)
    coordinator.progress(key(1), report(8.0), 2.0)
    before = coordinator.phase
    coordinator.progress(key(2), elsewhere(presence), 3.0)
    assert (before, coordinator.phase) == (Until.CALL, Until.BEGIN)


def test_begin_waits_for_the_join_of_one_that_is_lent_only() -> None:
    begun = {}
    for presence in (Presence.LENT, Presence.AWAY):
        coordinator = coordinator_of()
        coordinator.progress(key(1), report(8.0), 1.0)
        coordinator.progress(key(2), elsewhere(presence), 2.0)
        coordinator.join(key(1), join_of(member(1)), b"", 2.0)
        begun[presence] = coordinator.phase is Until.OVER
    assert begun == {Presence.LENT: False, Presence.AWAY: True}


def test_a_join_begins_the_round_of_one_that_has_said_that_it_is_away_since() -> None:
    """The order of the two messages does not matter."""
    coordinator = coordinator_of(replace(RULES, target_samples=8.0))
    coordinator.progress(key(1), report(8.0), 1.0)
    coordinator.join(key(1), join_of(member(1)), b"", 1.0)
    before = coordinator.phase
    coordinator.progress(key(2), elsewhere(Presence.AWAY), 2.0)
    assert (before, coordinator.phase) == (Until.BEGIN, Until.OVER)


def test_its_next_report_counts_again() -> None:
    coordinator = coordinator_of()
    coordinator.progress(key(2), elsewhere(Presence.LENT), 1.0)
    coordinator.progress(key(2), report(1.0), 2.0)
    coordinator.progress(key(1), report(8.0), 3.0)
    assert coordinator.phase is Until.CALL
