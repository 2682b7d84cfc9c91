"""Peers that die or hang while they train: the others go on, and whoever comes back is made equal to them."""

from __future__ import annotations

import time
from statistics import median

import pytest

from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, five_more, gaps, stopped, training
from tests.waiting import wait_until


@pytest.mark.parametrize("victim_is", ["coordinator", "other"])
def test_training_goes_on_after_a_kill(pool: Pool, victim_is: str) -> None:
    with training(pool, 4, optimizer="adamw", scheduler="cosine") as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.05)
        wait_until(lambda: len(events(peers.all[0])) >= 5)
        victim, *survivors = peers.all
        if victim_is == "coordinator":
            victim.ask(Training.die_as_coordinator)
            victim.process.wait(100)
        else:
            victim.kill()
        killed = time.monotonic()
        states, histories = five_more(survivors)

    assert all(event["kind"] == "epoch" for history in histories for event in history), "a survivor had to download"
    by_epoch(histories)
    assert all(state == states[0] for state in states), states
    for history in histories:
        healthy = median(gap for end, gap in gaps(history) if end < killed)
        assert max(gap for end, gap in gaps(history)[1:]) <= healthy + 9.0, (healthy, gaps(history))
        assert [event["peers"] for event in history[-3:]] == [3, 3, 3]


@pytest.mark.long
def test_a_peer_that_hung_is_made_equal_again(pool: Pool) -> None:
    with training(pool, 4, optimizer="adamw", scheduler="cosine", next_chunk_timeout=2.0) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.05)
        wait_until(lambda: len(events(peers.all[0])) >= 5)
        victim, *others = peers.all
        victim.hang()
        hung = time.monotonic()
        wait_until(lambda: sum(event["time"] > hung and event["peers"] == 3 for event in events(others[0])) >= 5)
        victim.go_on()
        woke = time.monotonic()
        wait_until(lambda: any(event.get("peers") == 4 and event["time"] > woke for event in events(victim)))
        states = stopped(peers.all)
        histories = [events(peer) for peer in peers.all]

    assert all(state == states[0] for state in states), states
    # It replays what the others did meanwhile, or downloads their state.
    caught_up = [event for event in histories[0] if event["time"] > woke and event.get("peers") != 4]
    assert caught_up, histories[0]
    for history in histories[1:]:
        healthy = median(gap for end, gap in gaps(history) if end < hung)
        # To notice takes `next_chunk_timeout` in a round, and three missed heartbeats (6 s) otherwise.
        waits = [gap for end, gap in gaps(history)[1:] if end < woke]
        assert max(waits) <= healthy + 6.0 + 6.0, (healthy, waits)
