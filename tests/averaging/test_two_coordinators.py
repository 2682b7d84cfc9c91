"""Real processes whose views were made unequal on purpose: no state gets two results, and every peer gets one."""

from __future__ import annotations

import itertools

from tests.averaging.processes import all_round, running


def test_unequal_views_end_in_one_result() -> None:
    with running(4, 100_000, min_matchmaking_time=10.0) as peers:
        assert {answer["digest"] for answer in all_round(peers) if answer} != {None}
        names = [peer.peer for peer in peers]
        # Each of these leaves two peers, or all four, believing that they coordinate.
        cuts = [
            {0: [1], 1: [0]},
            {0: [1, 2, 3]},
            {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]},
            dict(enumerate([[n for n in range(4) if n != me] for me in range(4)])),
        ]
        for cut in itertools.chain(cuts, cuts):
            for peer, forgotten in cut.items():
                peers[peer].ask(do="forget", peers=[names[n] for n in forgotten])
            answers = all_round(peers)
            assert all(answer is not None and "error" not in answer for answer in answers), answers
            results: dict[str, set[str]] = {}
            for answer in answers:
                assert answer is not None
                for tip, digest in answer["commits"]:
                    results.setdefault(tip, set()).add(digest)
            assert all(len(digests) == 1 for digests in results.values()), results
