"""Averagers as real processes, of which one is killed with SIGKILL in a step: the others agree, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import PeerProcess

pytestmark = pytest.mark.processes

WORKER = "tests.optim.averager_worker"


def step_all(peers: list[PeerProcess], seed: int) -> list[dict[str, Any] | None]:
    for number, peer in enumerate(peers):
        peer.tell(do="step", seed=seed + number, batch_size=number + 1)
    return [peer.hear() for peer in peers]


def assert_alike(answers: list[dict[str, Any] | None]) -> None:
    assert all(answer is not None and "error" not in answer for answer in answers), answers
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
    given: dict[str, Any] = {"averager": {"min_matchmaking_time": 10.0, **options}}
    peers = [PeerProcess(WORKER, given)]
    try:
        peers[0].started()
        given["initial_peers"] = peers[0].addresses
        peers += [PeerProcess(WORKER, given) for _ in range(2)]
        for peer in peers[1:]:
            peer.started()
        if not options.get("initial_group_bits"):  # those of which the first round may be of two
            assert_alike(step_all(peers, 0))
        peers[2].ask(do="die", where=where)
        answers = step_all(peers, 10)
        assert answers[2] is None, "the victim was not killed"
        assert peers[2].process.wait() == -9
        assert_alike(answers[:2])
        if not options.get("initial_group_bits"):
            answers = step_all(peers[:2], 20)
            assert_alike(answers)
            assert [answer["members"] for answer in answers if answer] == [2, 2]
    finally:
        for peer in peers:
            peer.end()
