"""How many samples an epoch has, and how long it takes, where several real peers train."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.optim.processes import Pool, Training, events, gaps, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until

pytestmark = pytest.mark.long

UNKNOWN = 4  # epochs until the peers know how fast each is


def epochs_of(peer: Any) -> list[dict[str, Any]]:
    return [event for event in events(peer) if event["kind"] == "epoch"]


def check_samples(history: list[dict[str, Any]], peers: int, target: int) -> None:
    """The epochs in which all took part, once they know each other."""
    samples = [event["samples"] / target for event in history if event["peers"] == peers][UNKNOWN:]
    assert len(samples) >= 8, "there were epochs without somebody"
    assert all(part >= 1.0 for part in samples), "an epoch ended on samples that nobody had"
    assert statistics.mean(samples) <= 1.1, samples
    assert sum(part <= 1.1 for part in samples) >= 0.8 * len(samples), samples


@pytest.mark.parametrize(
    ("batches", "pauses", "target"),
    [
        ([16, 16, 16, 16], [0.1, 0.1, 0.1, 0.1], 16 * 14),  # four steps of each are 1.14 of the target
        ([16, 8, 24, 16], [0.1, 0.17, 0.13, 0.31], 16 * 20),
    ],
    ids=["four in lockstep", "four of different speed"],
)
def test_an_epoch_has_at_most_1_1_of_the_target(
    pool: Pool, batches: list[int], pauses: list[float], target: int
) -> None:
    with training(pool, len(batches), optimizer="sgd", target=target, matchmaking_time=10.0) as peers:
        for peer, batch, pause in zip(peers.all, batches, pauses, strict=True):
            peer.ask(Training.train, batch=batch, pause=pause)
        wait_until(lambda: len(epochs_of(peers.all[0])) >= UNKNOWN + 10)
        history = epochs_of(peers.all[0])
    check_samples(history, len(batches), target)
    # And waiting costs no time: an epoch is not longer than the peers need for the target, and one step more.
    speed = sum(batch / pause for batch, pause in zip(batches, pauses, strict=True))
    lengths = [length for _, length in gaps(history)[UNKNOWN:]]
    assert statistics.median(lengths) < 1.5 * (target / speed + max(pauses)), lengths


@only_in_soak
@pytest.mark.parametrize("option", ["delay_grad_averaging", "use_local_updates"])
def test_so_has_one_that_ends_in_the_background(pool: Pool, option: str) -> None:
    """Nobody waits there: a step that was under way when the round was called counts for the next epoch."""
    batches, pauses, target = [8, 8, 8], [0.1, 0.12, 0.14], 8 * 24
    with training(pool, 3, optimizer="sgd", target=target, matchmaking_time=10.0, **{option: True}) as peers:
        for peer, batch, pause in zip(peers.all, batches, pauses, strict=True):
            peer.ask(Training.train, batch=batch, pause=pause)
        wait_until(lambda: len(epochs_of(peers.all[0])) >= UNKNOWN + 10)
        history = epochs_of(peers.all[0])
    check_samples(history, 3, target)
