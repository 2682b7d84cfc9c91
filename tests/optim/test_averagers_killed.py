"""Averagers as real processes, of which one is killed with SIGKILL in a step: the others agree, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import Worker, outcomes, workers
from tests.workers.gradients import Gradients, Step

pytestmark = pytest.mark.processes


def step_all(peers: list[Worker[Gradients]], seed: int) -> list[Step | None]:
    each = enumerate(peers)
    return outcomes([peer.tell(Gradients.step, seed + number, batch_size=number + 1) for number, peer in each])


def assert_alike(answers: list[Step | None]) -> None:
    assert None not in answers
    assert len({answer["digest"] for answer in answers if answer}) == 1


@pytest.mark.parametrize(
    ("options", "where"),
    [
        pytest.param({"averager_rank": 3}, "between", marks=pytest.mark.long),
        ({"averager_rank": 3}, "result"),
        pytest.param({}, "result", marks=pytest.mark.long),
        ({"initial_group_bits": "0"}, "result"),
    ],
)
def test_survivors_of_a_step_agree(options: dict[str, Any], where: str) -> None:
    with workers(Gradients, 3, options={"min_matchmaking_time": 10.0, **options}) as peers:
        if not options.get("initial_group_bits"):  # those of which the first round may be of two
            assert_alike(step_all(peers, 0))
        peers[2].ask(Gradients.die, where)
        answers = step_all(peers, 10)
        assert answers[2] is None, "the victim was not killed"
        assert peers[2].process.wait() == -9
        assert_alike(answers[:2])
        if not options.get("initial_group_bits"):
            answers = step_all(peers[:2], 20)
            assert_alike(answers)
            assert [answer["members"] for answer in answers if answer] == [2, 2]
