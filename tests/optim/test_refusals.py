"""Peers that do not fit the run are told what differs, and the others' rounds go on."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest

from tests.optim.processes import (
    Failed,
    Peers,
    Pool,
    Training,
    ask_all,
    begin,
    by_epoch,
    events,
    gaps,
    stopped,
    training,
)
from tests.soaked import only_in_soak
from tests.waiting import wait_until


def refusal(pool: Pool, peers: Peers, run: dict[str, Any]) -> str:
    """What a peer with this run is told when it makes its optimizer."""
    [worker] = pool.take(1)
    begin(worker, peers.addresses, run)
    with pytest.raises(Failed) as refused:
        worker.started()
    pool.idle.append(worker)
    return str(refused.value)


SOME = {
    "target_batch_size is 128 here, and 64 there": {"target": 128},
    "optimizer is AdamW here, and SGD there": {"optimizer": "adamw"},
    "parameters[0] is float32[21, 10] here, and float32[20, 10] there": {"width": 21},
}
MORE = {
    "min_peers is 2 here, and 1 there": {"min_peers": 2},
    "grad_compression is float16 here, and none there": {"codec": "float16"},
    "scheduler is MultiStepLR here": {"scheduler": "steps"},
}


@pytest.mark.parametrize(
    ("others", "logged"),
    [
        pytest.param(SOME, "target_batch_size is 64 here, and 128 there", id="some"),
        pytest.param(MORE, "min_peers is 1 here, and 2 there", id="more", marks=only_in_soak),
    ],
)
def test_a_peer_with_other_options_is_refused_by_name(
    pool: Pool, others: dict[str, dict[str, Any]], logged: str
) -> None:
    with training(pool, 3) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: len(events(peers.all[0])) >= 5)
        before = time.monotonic()
        for told, run in others.items():
            assert told in refusal(pool, peers, run)
        stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    assert all(report["errors"] == [] for report in reports)
    histories = [report["events"] for report in reports]
    by_epoch(histories)
    for history in histories:
        assert all(event["kind"] == "epoch" and event["peers"] == 3 for event in history)
        healthy = median(gap for end, gap in gaps(history) if end < before)
        disturbed = [gap for end, gap in gaps(history) if end > before]
        assert max(disturbed) < 3 * healthy + 9.0, (healthy, disturbed)
    # The others know whom they refused and why, too.
    assert any(logged in line for report in reports for line in report["log"])


def test_gradients_that_are_not_finite_stay_out(pool: Pool) -> None:
    with training(pool, 3, optimizer="adamw") as peers:
        sick = peers.all[0]
        for peer in peers.all:
            peer.ask(Training.train, batch=48 if peer is sick else 8, pause=0.02)
        wait_until(lambda: len(events(sick)) >= 3)
        sick.ask(Training.poison, steps=6)
        wait_until(lambda: sick.ask(Training.report)["log"] != [])
        seen = len(events(sick))
        wait_until(lambda: len(events(sick)) >= seen + 4)
        states = stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    assert all(state == states[0] for state in states), states
    histories = [report["events"] for report in reports]
    by_epoch(histories)
    assert all(event["kind"] == "epoch" and event["peers"] == 3 for history in histories for event in history)
    assert any("not finite" in line for line in reports[0]["log"])
    assert all(report["log"] == [] for report in reports[1:]), "the others were bothered"
    samples = [event["samples"] for event in histories[1]]
    assert min(samples) <= 32, "its samples counted"
    assert samples[-1] >= 64, "it did not come back"
