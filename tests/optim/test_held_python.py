"""A process whose Python is held for ten seconds, as by a compiler, is left out once at most. Then it is waited for."""

from __future__ import annotations

import time

import pytest

from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, stopped, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until

pytestmark = pytest.mark.long

HELD_SECONDS = 10.0


@pytest.mark.parametrize("who", ["the coordinator", pytest.param("another", marks=only_in_soak)])
def test_all_epochs_after_the_first_are_made_together(pool: Pool, who: str) -> None:
    with training(pool, 3, optimizer="adamw", target=64, awaits_others=True) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.03)
        wait_until(lambda: all(sum(e.get("peers") == 3 for e in events(peer)) >= 3 for peer in peers.all))
        coordinator = peers.all[0].ask(Training.coordinator)
        held = next(peer for peer in peers.all if (peer.peer == coordinator) == (who == "the coordinator"))
        for _ in range(2):
            wait_until(lambda: all([e.get("peers") for e in events(peer)][-3:] == [3, 3, 3] for peer in peers.all))
            began = time.monotonic()
            held.ask(Training.hold, HELD_SECONDS)
            until = began + HELD_SECONDS
            for peer in peers.all:
                while sum(event["time"] > until for event in events(peer)) < 3:
                    time.sleep(0.2)
        states = stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    assert all(state == states[0] for state in states)
    by_epoch([report["events"] for report in reports])
    for report in reports:
        after = [event for event in report["events"] if event["time"] > began]
        assert {(event["kind"], event.get("peers")) for event in after} == {("epoch", 3)}
        assert report["log"] == [], report["log"]
