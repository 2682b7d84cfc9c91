"""A member whose process hangs keeps its connections, and its kernel answers for it; it is left out all the same."""

from __future__ import annotations

import pytest

from tests.averaging.processes import all_round, running

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_a_stopped_process_is_left_out_and_comes_back() -> None:
    with running(4, 200_000, min_matchmaking_time=100.0, next_chunk_timeout=1.5) as peers:
        all_round(peers)
        stopped = peers[2]
        stopped.hang()
        try:
            others = [peer for peer in peers if peer is not stopped]
            answers = all_round(others)
            for answer in answers:
                assert answer is not None
                assert len(answer["members"]) == 3
                assert answer["seconds"] < 60, "left out for its silence, not when the matchmaking time was over"
            assert len({answer["digest"] for answer in answers if answer}) == 1
        finally:
            stopped.go_on()
        for _ in range(20):  # it finds out that it was left out when it next says something
            answers = all_round(peers, timeout=8.0)
            if all(answer is not None and len(answer["members"]) == 4 for answer in answers):
                break
        assert len({answer["digest"] for answer in answers if answer}) == 1, answers
        assert all(answer is not None and len(answer["members"]) == 4 for answer in answers), answers
