"""For how long a coordinator is waited for, and that one which does its duty can keep to it."""

from __future__ import annotations

import pytest

from shoal.swarm.protocol.deadlines import BEGIN_SLACK_SECONDS, Deadlines, Duty
from shoal.swarm.protocol.gathering import Gathering, Until
from tests.swarm.rounds import RULES, at_tip, join_of, key, member, members, signer

WAIT = 15.0


def begun_after(haste: float) -> float:
    """When a round begins for which one that is expected never joins."""
    lead = Gathering(key(1), at_tip(), RULES, signer(1), haste=haste)
    lead.expect(members(1, 2, 3), 0.0)
    for number in (1, 2):
        lead.join(key(number), join_of(member(number), patience=WAIT), b"", 0.0)
    now = 0.0
    while lead.phase is Until.BEGIN and (due := lead.wake_at()) is not None:
        now = due
        lead.tick(now)
    return now


@pytest.mark.parametrize("failed", range(6))
@pytest.mark.parametrize("attempt", range(3))
def test_who_was_deposed_before_can_still_begin_in_time(failed: int, attempt: int) -> None:
    deadlines = Deadlines()
    deadlines.failed[key(1)] = failed
    deadlines.owed(key(1), Duty.BEGIN, 0.0)
    begun = begun_after(deadlines.haste(key(1), attempt))
    slack = 0.02  # for a message
    assert deadlines.missed(key(1), {Duty.BEGIN: WAIT + BEGIN_SLACK_SECONDS}, attempt, begun + slack) is None


@pytest.mark.parametrize("attempt", range(4))
def test_a_long_matchmaking_time_is_waited_for_at_every_attempt(attempt: int) -> None:
    deadlines = Deadlines()
    deadlines.owed(key(1), Duty.BEGIN, 0.0)
    assert deadlines.missed(key(1), {Duty.BEGIN: 302.0}, attempt, 301.0) is None
    assert deadlines.missed(key(1), {Duty.BEGIN: 302.0}, attempt, 303.0) is Duty.BEGIN
