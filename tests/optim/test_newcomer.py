"""A peer that starts late downloads the state while the others go on, and trains with them from the next epoch on."""

from __future__ import annotations

import time
from statistics import median

import pytest

from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, gaps, training
from tests.waiting import wait_until

WIDE = 512
"""Width of the model whose state (with AdamW's) is 3 MB: its download takes several messages."""


@pytest.mark.long
def test_newcomer_joins_while_the_others_train(pool: Pool) -> None:
    run = {"optimizer": "adamw", "scheduler": "steps", "width": WIDE, "target": 64}
    with training(pool, 4, **run) as peers:
        old = list(peers.all)
        ask_all(old, Training.train, batch=8, pause=0.1)
        wait_until(lambda: len(events(old[0])) >= 6)
        before = time.monotonic()
        [newcomer] = peers.add(1, seed=77)
        newcomer.ask(Training.train, batch=8, pause=0.1)
        wait_until(lambda: sum(event["kind"] == "epoch" for event in events(newcomer)) >= 2)
        after = time.monotonic()
        last = max(event["epoch"] for peer in old for event in events(peer)) + 5
        states = ask_all(peers.all, Training.stop, last)
        histories = [events(peer) for peer in peers.all]

    # It took the state (again, where the others' next epoch was over before its download) and then made every epoch.
    newest = histories[4]
    downloads = [event for event in newest if event["kind"] == "download"]
    steps = newest[len(downloads) :]
    assert 1 <= len(downloads) <= 3, newest
    assert all(event["kind"] == "epoch" for event in steps), newest
    assert [event["epoch"] for event in steps] == list(range(downloads[-1]["epoch"] + 1, last + 1)), newest
    # It is in the next round; one that was under way already it has fetched.
    assert all(event["peers"] == 5 for event in steps[1:]), steps
    # The others' epochs went on while it started and downloaded. If an epoch was over before its download, they have
    # waited for the next one, once.
    assert all(event["kind"] == "epoch" for history in histories[:4] for event in history), "a veteran downloaded"
    healthy = median(gap for end, gap in gaps(histories[0]) if end < before)
    during = [gap for end, gap in gaps(histories[0]) if before < end < after + 1]
    assert sorted(during)[-len(downloads)] < 3 * healthy + 5.0, (healthy, during)
    assert max(during) < 3 * healthy + 9.0, (healthy, during)
    # All are the same in all bits, of the optimizer's state too.
    assert all(state == states[0] for state in states), states
    by_epoch(histories)


@pytest.mark.long
def test_a_newcomer_whose_download_takes_longer_than_an_epoch_catches_up(pool: Pool) -> None:
    """Each state that it has downloaded is several epochs old by then, until the others wait for it: once."""
    slow = 4.0
    with training(pool, 2, optimizer="adamw", target=64, matchmaking_time=20.0) as peers:
        old = list(peers.all)
        ask_all(old, Training.train, batch=16, pause=0.05)
        wait_until(lambda: len(events(old[0])) >= 6)
        [newcomer] = peers.add(1, seed=77, download_seconds=slow)
        newcomer.ask(Training.train, batch=16, pause=0.05)
        wait_until(lambda: sum(event["kind"] == "epoch" for event in events(newcomer)) >= 5)
        last = max(event["epoch"] for peer in old for event in events(peer)) + 3
        states = ask_all(peers.all, Training.stop, last)
        histories = [events(peer) for peer in peers.all]
    newest = histories[2]
    downloads = [event for event in newest if event["kind"] == "download"]
    assert len(downloads) == 1, newest
    # From then on it was in every epoch.
    made = [event["epoch"] for event in newest if event["kind"] == "epoch"]
    assert made == list(range(downloads[0]["epoch"] + 1, last + 1)), newest
    # The others have waited once, and no longer than it took.
    waits = [length for _, length in gaps(histories[0]) if length > 0.9 * slow]
    assert len(waits) <= 1, waits
    assert all(length < slow + 10 for length in waits), waits
    assert all(state == states[0] for state in states), states
    by_epoch(histories)


def test_peers_that_begin_from_different_weights_are_equal_after_one_epoch(pool: Pool) -> None:
    with training(pool, 4, optimizer="adamw", scheduler="cosine", seed=[1, 2, 3, 3]) as peers:
        ask_all(peers.all, Training.train, batch=16, pause=0.0)
        states = ask_all(peers.all, Training.stop, 4)
        histories = [events(peer) for peer in peers.all]
    assert all(state == states[0] for state in states), states
    digests = by_epoch(histories)
    assert set(digests) == {1, 2, 3, 4}
    # The two that had the same weights keep them; the others download.
    assert [history[0]["kind"] for history in histories] == ["download", "download", "epoch", "epoch"]
    assert [event["kind"] for event in histories[0]] == ["download", "epoch", "epoch", "epoch"]
