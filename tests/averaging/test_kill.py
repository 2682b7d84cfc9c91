"""SIGKILL at each phase of a round: the others commit it, alike in all bits, and go on."""

from __future__ import annotations

from statistics import median

import pytest

from tests.averaging.processes import Peer, all_round, running
from tests.workers.averager import Averager

pytestmark = pytest.mark.processes

ELEMENTS = 1_500_000
PART_SIZE_BYTES = 1 << 16
"""92 parts, so that a peer can be killed in the middle of them."""


def coordinator_of(peers: list[Peer]) -> Peer:
    name = peers[0].ask(Averager.coordinator)
    return next(peer for peer in peers if peer.peer == name)


@pytest.mark.parametrize(
    ("victim_is", "where", "number"),
    [
        ("coordinator", "part", 20),  # in the middle, when it is the coordinator, a reducer and a sender
        pytest.param("coordinator", "begin", 2, marks=pytest.mark.long),  # has told BEGIN to two of four
        pytest.param("coordinator", "commit", 1, marks=pytest.mark.long),  # has told COMMIT to one of four
        ("other", "result", 12),  # a reducer that has sent half of its results
        pytest.param("other", "part", 30, marks=pytest.mark.long),  # a sender that has sent less than half of its parts
    ],
)
def test_survivors_commit_the_same(victim_is: str, where: str, number: int) -> None:
    with running(4, ELEMENTS, min_matchmaking_time=15.0, part_size_bytes=PART_SIZE_BYTES) as peers:
        healthy = []
        for _ in range(3):
            answers = all_round(peers)
            assert None not in answers, answers
            healthy.append(max(answer["seconds"] for answer in answers if answer))
        coordinator = coordinator_of(peers)
        victim = coordinator if victim_is == "coordinator" else next(p for p in peers if p is not coordinator)
        victim.ask(Averager.die, where, number)
        answers = all_round(peers)
        survivors = [peer for peer in peers if peer is not victim]
        results = [answer for peer, answer in zip(peers, answers, strict=True) if peer is not victim]
        assert answers[peers.index(victim)] is None, "the victim was not killed in the round"
        assert victim.process.wait() == -9
        assert None not in results, results
        assert len({result["digest"] for result in results if result}) == 1
        slowest = max(result["seconds"] for result in results if result)
        assert slowest <= median(healthy[1:]) + 9.0, (slowest, healthy)

        answers = all_round(survivors)
        assert len({answer["digest"] for answer in answers if answer}) == 1
        for answer in answers:
            assert answer is not None
            assert len(answer["members"]) == 3
            assert answer["first"] == pytest.approx(1.0)
            assert answer["last"] == pytest.approx(1.0)
