"""SIGKILL in the middle of a round through a lossy compression: the others commit one result, alike in all bits."""

from __future__ import annotations

import pytest

from tests.averaging.compressions import COMPRESSIONS
from tests.averaging.processes import all_round, running
from tests.workers.averager import Averager

pytestmark = [pytest.mark.processes, pytest.mark.long]

ELEMENTS = 8_000_000


@pytest.mark.parametrize(
    ("compression", "where", "number"),
    [
        ("uniform", "part", 8),  # a reducer and sender, with parts and results of its own under way
        ("by tensor", "result", 4),  # a reducer that has sent half of its results
    ],
)
def test_survivors_of_a_lossy_round_commit_the_same(compression: str, where: str, number: int) -> None:
    spec = COMPRESSIONS[compression].spec
    with running(4, ELEMENTS, min_matchmaking_time=15.0, compression=spec) as peers:
        answers = all_round(peers)
        assert None not in answers, answers
        assert len({answer["digest"] for answer in answers if answer}) == 1
        victim = peers[3]
        victim.ask(Averager.die, where, number)
        *results, killed = all_round(peers, [0.1, 0.2, 0.3, 0.4])
        assert killed is None, "the victim was not killed in the round"
        assert None not in results, results
        assert len({result["digest"] for result in results if result}) == 1
        for result in all_round(peers[:3], [0.1, 0.2, 0.3]):
            assert result is not None
            assert result["first"] == pytest.approx(0.2, rel=0.02)
            assert result["last"] == pytest.approx(0.2, rel=0.02)
