"""Until when a run waits for newcomers: the budget, the donors' word, and who lies."""

from __future__ import annotations

import logging

import pytest

from shoal.swarm.protocol.messages import Pause, Progress
from shoal.swarm.protocol.newcomers import (
    FIRST_SECONDS,
    IDLE_SECONDS,
    JOIN_SECONDS,
    LONGEST_SECONDS,
    SPARE,
    SPARE_SECONDS,
    TOLERANCE,
    TOLERANCE_SECONDS,
    Newcomers,
)
from shoal.swarm.protocol.tip import Tip

TIP = Tip.genesis("run")
RATE = 1e6


def key(number: int) -> bytes:
    return number.to_bytes(32)


def loading(seconds: float, *, rate: float = RATE, asks: bool = True, tip: Tip = TIP) -> Progress:
    return Progress(tip, 0.0, rate, seconds=seconds, loading=True, asks=asks)


class Run:
    """A coordinator that hears a newcomer every two seconds."""

    def __init__(self, share: float = 0.1) -> None:
        self.newcomers, self.now = Newcomers(share), 0.0
        self.newcomers.new_tip(TIP, 0.0)

    def claims(self, number: int, seconds: float, *, rate: float = RATE, due_in: float = 0.0) -> Pause:
        return self.newcomers.claims(key(number), loading(seconds, rate=rate), self.now, leads=True, due_in=due_in)

    def wait(self, seconds: float = 2.0) -> None:
        """All members wait for newcomers."""
        self.newcomers.told(max(0.0, self.newcomers.until(TIP) - self.now), self.now)
        self.now += seconds

    def train(self, seconds: float) -> None:
        self.newcomers.is_over(self.now)
        self.now += seconds


def test_a_newcomer_is_awaited_until_it_joins() -> None:
    run, waited = Run(), 0.0
    run.claims(1, 0.0, rate=0.0)
    while waited < 60.0:
        run.wait()
        waited += 2.0
        run.newcomers.moved(key(1), 2 * RATE, run.now)
        assert run.claims(1, 60.0 - waited).seconds > 2.0
    run.newcomers.has_come(key(1), run.now)
    assert run.newcomers.until(TIP) == run.now + JOIN_SECONDS
    run.newcomers.gone(key(1))
    assert run.newcomers.until(TIP) < run.now


def test_the_budget_is_a_share_of_the_time_and_the_first_wait() -> None:
    run = Run()
    assert run.newcomers.budget(run.now) == FIRST_SECONDS
    run.claims(1, 60.0)
    run.wait(30.0)
    assert run.newcomers.budget(run.now) == FIRST_SECONDS - 30.0
    run.train(100.0)
    assert run.newcomers.budget(run.now) == pytest.approx(FIRST_SECONDS - 30.0 + 10.0)
    run.train(1e6)
    assert run.newcomers.budget(run.now) == LONGEST_SECONDS


def test_a_run_that_never_waits() -> None:
    run = Run(share=0.0)
    assert run.claims(1, 1.0) == Pause(0.0, 0.0, 0.0, 0.0)
    assert run.newcomers.until(TIP) <= run.now
    assert run.newcomers.budget(1e9) == 0.0


def test_who_does_not_fit_waits_for_the_budget_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run, takes = Run(), SPARE * 200.0 + SPARE_SECONDS
    with caplog.at_level(logging.WARNING):
        answer, again = run.claims(1, 200.0), run.claims(1, 200.0)
    assert answer == again == Pause(0.0, FIRST_SECONDS, 0.1, 0.0)
    [record] = caplog.records
    assert "200 s" in record.getMessage()
    run.train((takes - FIRST_SECONDS) / 0.1)
    assert run.claims(3, 200.0).seconds == pytest.approx(takes)


def test_the_rest_of_the_epoch_costs_nothing() -> None:
    run = Run()
    assert run.claims(1, 200.0, due_in=150.0).seconds > 200.0


def test_one_that_claims_to_load_for_ever_costs_the_budget_once() -> None:
    """It moves as many bytes as it says, and never comes."""
    run = Run()
    while run.claims(1, 50.0).seconds:
        run.wait()
        run.newcomers.moved(key(1), 2 * RATE, run.now)
        assert run.now < 2 * FIRST_SECONDS, "it held the run for longer than the budget"
    assert run.now <= FIRST_SECONDS + 2.0
    run.train(10.0)
    assert not run.claims(2, 50.0).seconds, "another key begins with a budget of its own"


@pytest.mark.parametrize("rate", [0.0, RATE], ids=["nothing moves", "less moves than it says"])
def test_one_that_does_not_load_is_awaited_for_seconds(rate: float) -> None:
    run = Run()
    while run.claims(1, 50.0, rate=rate).seconds:
        run.wait()
        run.newcomers.moved(key(1), 0.4 * rate, run.now)
        assert run.now < 2 * IDLE_SECONDS, "donors see no such rate"


def test_a_thousand_keys_have_one_budget() -> None:
    run = Run()
    for number in range(1000):
        run.claims(number, 100.0, rate=0.0)
    held = 0.0
    for number in range(1000, 3000):  # always another one that has just begun
        if not run.claims(number, 0.0, rate=0.0).seconds:
            break
        run.wait()
        held += 2.0
    assert held <= FIRST_SECONDS


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_members_bear_a_lying_coordinator_within_the_budget(share: float) -> None:
    """It says again and again that the round waits a little longer."""
    member, most = Newcomers(share), TOLERANCE * (FIRST_SECONDS if share else 0.0) + TOLERANCE_SECONDS
    member.new_tip(TIP, 0.0)
    for now in range(2000):
        member.told(10.0, float(now))
    assert member.told_until == 1999.0, "the deadline for BEGIN counts"
    member.is_over(2000.0)
    member.told(10.0, 2000.0)
    assert member.told_until <= 2000.0 + TOLERANCE_SECONDS + TOLERANCE * share * 2000
    other = Newcomers(share)
    other.new_tip(TIP, 0.0)
    other.told(600.0, 0.0)
    assert other.told_until == pytest.approx(most)


def test_a_newcomer_takes_over_the_budget() -> None:
    new = Newcomers(0.1)
    new.adopt(17.0, 5.0)
    assert new.budget(5.0) == 17.0
    new.adopt(1e9, 5.0)
    assert new.budget(5.0) == LONGEST_SECONDS


def test_the_run_saves_only_for_newcomers_that_are_there() -> None:
    run = Run()
    run.claims(1, 400.0)
    assert not run.claims(2, 0.0, rate=0.0).seconds, "its first seconds would use up what the other waits for"
    run.newcomers.gone(key(1))
    assert run.claims(3, 0.0, rate=0.0).seconds == IDLE_SECONDS


def test_a_coordinator_that_was_stopped_first_hears_the_newcomers() -> None:
    run = Run()
    run.claims(1, 20.0)
    run.now += 31.0
    assert run.newcomers.until(TIP) < run.now
    run.newcomers.stood_still(run.now)
    assert run.newcomers.until(TIP) == run.now + IDLE_SECONDS
    assert run.claims(1, 5.0).seconds > 5.0


def test_a_successor_knows_who_loads_and_trusts_it_at_first() -> None:
    """It hears the same claims, and not what other donors see."""
    member = Newcomers(0.1)
    member.new_tip(TIP, 0.0)
    for now in range(0, 30, 2):
        member.claims(key(1), loading(60.0 - now), float(now))
    assert member.until(TIP) > 50.0
    assert member.claims(key(1), loading(30.0), 30.0, leads=True).seconds > 0


def test_a_claim_is_of_one_tip() -> None:
    run, after = Run(), TIP.after(b"root", 1.0)
    run.claims(1, 50.0)
    run.newcomers.new_tip(after, run.now)
    assert run.newcomers.until(after) < run.now
    assert run.newcomers.claims(key(1), loading(50.0, tip=after), run.now, leads=True).seconds > 50.0
