"""With min_peers as a share of the last epoch's peers, a minority waits instead of forking the run."""

from __future__ import annotations

import time

import pytest

from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, training
from tests.waiting import wait_until


@pytest.mark.long
def test_who_is_left_of_three_waits_for_a_second_one(pool: Pool) -> None:
    times = {"matchmaking_time": 2.0, "averaging_timeout": 6.0, "awaits_others": True}
    with training(pool, 3, min_peers=0.6, **times) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: all(sum(event.get("peers") == 3 for event in events(p)) >= 3 for p in peers.all))
        last, *others = peers.all
        for peer in others:
            peer.kill()
        time.sleep(2.0)  # what was committed before is applied
        before = len(events(last))
        time.sleep(8.0)
        assert len(events(last)) == before
        report = last.ask(Training.report)
        assert not report["errors"]
        assert any("1 peers are here, and min_peers=0.6 of 3 in the last epoch, which is 2" in line
                   for line in report["log"]), report["log"]  # fmt: skip
        (late,) = peers.add(1)
        late.ask(Training.train, batch=8, pause=0.02)
        wait_until(lambda: sum(event.get("peers") == 2 for event in events(last)) >= 3, 60.0)
        assert all(event["peers"] > 1 for event in events(last) if event["kind"] == "epoch")
        by_epoch([events(last), events(late)])
