"""Real processes whose views were made unequal on purpose: no state gets two results, and all find together again."""

from __future__ import annotations

import pytest

from tests.averaging.processes import all_round, running
from tests.peers import ask_all
from tests.workers.averager import Averager

pytestmark = pytest.mark.processes

# Who forgets whom. Each may leave two peers, or all four, believing that they coordinate. What they know still joins
# them all, be it through others or, where nobody knows anybody, through the directory.
FORGOTTEN = [
    {0: [1], 1: [0]},
    {0: [1, 2, 3]},
    {0: [1, 2], 1: [2, 3], 3: [0, 1]},
    {0: [2, 3], 1: [3], 2: [0, 1], 3: [0, 1]},
    {0: [1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 3], 3: [0, 1, 2]},
]


@pytest.mark.long
def test_unequal_views_never_give_a_state_two_results() -> None:
    with running(4, 100_000, min_matchmaking_time=3.0) as peers:
        all_round(peers)
        names = [peer.peer for peer in peers]
        for forgotten in FORGOTTEN:
            for peer, others in forgotten.items():
                peers[peer].ask(Averager.forget, [names[n] for n in others])
            answers = ask_all(peers, Averager.until, members=4, seconds=100)
            results: dict[str, set[str]] = {}
            for answer in answers:
                assert answer["sizes"][-1] == 4, (forgotten, answers)
                for tip, digest in answer["commits"]:
                    results.setdefault(tip, set()).add(digest)
            assert results, "no commit was recorded"
            assert all(len(digests) == 1 for digests in results.values()), (forgotten, results)
