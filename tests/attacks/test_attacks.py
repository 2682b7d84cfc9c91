"""One attacker with one identity, beside four honest trainers, each a process: nobody ends, nobody stands for longer
than a deadline, and all hold equal parameters afterwards.

All attacks in turn take two minutes. Each on its own takes a quarter of an hour together: set SHOAL_SOAK, or see
`make attacks`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.run import NEWCOMERS, PEERS, run_all, run_one

pytestmark = [pytest.mark.timed, pytest.mark.long]

DEADLINE = 18.0  # seconds; the longest that `honest` trains with is 15 (DECIDE), and then others take over
TURN = 2.0  # seconds of each attack, of all in turn
SECONDS = 20.0  # so a run that stands for as long as the attacker is there is seen


def test_all_attacks_in_turn_end_and_stop_nobody(tmp_path: Path) -> None:
    seen = run_all(list(ATTACKS), seconds=TURN * len(ATTACKS), before=3.0, after=10.0, folder=tmp_path)
    assert seen.ended == []
    assert seen.pause < DEADLINE
    assert seen.equal


def test_attacks_on_the_run_of_a_strand_stop_nobody(tmp_path: Path) -> None:
    """Some that have most effect there: a later tip, a COMMIT of nothing, results that are kept back."""
    seen = run_all(["1b", "4", "9b"], seconds=3 * TURN, before=2.0, after=6.0, folder=tmp_path, strands=2)
    assert seen.ended == []
    assert seen.pause < DEADLINE
    assert seen.equal


@pytest.mark.skipif("SHOAL_SOAK" not in os.environ, reason="a quarter of an hour: set SHOAL_SOAK, or make attacks")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_and_stops_nobody(attack: str, tmp_path: Path) -> None:
    seen = run_one(attack, seconds=SECONDS, before=3.0, after=10.0, folder=tmp_path)
    assert seen.ended == []
    assert seen.pause < DEADLINE
    assert seen.equal
    assert seen.samples[1] > seen.samples[0] / 2, "no epoch ends before the target is reached"
    if attack in NEWCOMERS:
        assert seen.newcomer is not None
        assert seen.newcomer >= PEERS, "a newcomer finds the others"
