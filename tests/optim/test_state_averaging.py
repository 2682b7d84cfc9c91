"""State in the round: machines that round in other ways are made equal, alike ones pay nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model
from tests.optim.processes import Peers, Pool, Trained, Training, ask_all, events, fixed, stopped, training
from tests.waiting import wait_until

SHARES = [(0, 8), (8, 40), (40, 64)]
EPOCHS = 6


def train(peers: Peers, epochs: int = EPOCHS) -> tuple[list[Trained], list[list[dict[str, Any]]]]:
    """That many epochs of the fixed batches; how the peers end, and what they reported."""
    trained = fixed(peers.all, SHARES[: len(peers.all)], epochs)
    return trained, [events(peer) for peer in peers.all]


@pytest.mark.parametrize("what", ["parameters", "exp_avg_sq"])
@pytest.mark.parametrize("averaged", [True, pytest.param(False, marks=pytest.mark.long)])
def test_unlike_machines_are_made_equal(pool: Pool, what: str, averaged: bool) -> None:
    """One machine's steps come out otherwise in the first epochs."""
    statistics = ("exp_avg_sq",) if what == "exp_avg_sq" else ()
    with training(
        pool,
        3,
        optimizer="adamw",
        machine=["one", "other", "one"],
        nudge=[["", 0], [what, 3], ["", 0]],
        average_opt_statistics=[statistics] * 3,
        average_state_every=1 if averaged else 100,
    ) as peers:
        answers, histories = train(peers)
    assert all(event["kind"] == "epoch" and event["peers"] == 3 for history in histories for event in history)
    assert (answers[0]["parameters_digest"] == answers[1]["parameters_digest"]) is averaged
    assert answers[0]["parameters_digest"] == answers[2]["parameters_digest"]
    assert answers[0]["statistics"] == answers[2]["statistics"]
    if what == "exp_avg_sq":
        assert (answers[0]["statistics"] == answers[1]["statistics"]) is averaged
    # The state is sent where it differs, and only there: after the nudges, and not in the first round or the last.
    sent = [sum(history[epoch]["sent"] for history in histories) for epoch in range(EPOCHS)]
    assert (sent[2] > 1.5 * sent[0]) is averaged, sent
    assert sent[-1] < 1.1 * sent[0], sent


def test_statistics_that_are_not_named_stay_each_peers_own(pool: Pool) -> None:
    with training(
        pool, 2, optimizer="adamw", target=40, machine=["one", "other"], nudge=[["", 0], ["exp_avg_sq", 2]]
    ) as peers:
        answers, _ = train(peers)
    assert answers[0]["statistics"] != answers[1]["statistics"]


def test_a_statistic_that_the_optimizer_does_not_keep(alone: Any) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["sgd"], average_opt_statistics=["exp_avg_sq"])
    backward(model, *fixed_batch(0))
    with pytest.raises(ValueError, match=r"'exp_avg_sq', and SGD keeps no such.*momentum_buffer"):
        optimizer.step(batch_size=64)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 3])
def test_extra_tensors_are_averaged_by_samples(pool: Pool, every: int) -> None:
    values = [1.0, 2.0, 4.0]
    with training(pool, 3, optimizer="sgd", shares_extra=True, extra=values, average_state_every=every) as peers:
        answers, histories = train(peers, epochs=4)
        extras = ask_all(peers.all, Training.extras)
    mean = sum(value * (stop - start) for value, (start, stop) in zip(values, SHARES, strict=True)) / 64
    for value, seen in zip(values, extras, strict=True):
        before, after = seen[: every - 1], seen[every - 1 :]
        assert all(extra == [value] * 3 for extra in before), seen
        torch.testing.assert_close(torch.tensor(after), torch.full((len(after), 3), mean), rtol=1e-6, atol=0.0)
        assert after == extras[0][every - 1 :], "not the same bits"
    assert len({answer["parameters_digest"] for answer in answers}) == 1
    assert all(event["kind"] == "epoch" for history in histories for event in history)


def test_a_lossy_codec_of_the_state_leaves_peers_equal(pool: Pool) -> None:
    with training(
        pool,
        3,
        optimizer="adamw",
        state_codec="float16",
        machine=["one", "other", "third"],
        nudge=[["", 0], ["parameters", 3], ["", 0]],
    ) as peers:
        answers, _ = train(peers)
    assert len({answer["parameters_digest"] for answer in answers}) == 1


@pytest.mark.long
def test_a_newcomer_through_a_lossy_codec_counts_as_unlike(pool: Pool) -> None:
    """It is made equal by the next average of the state, and not taken for one with a fault. What is not averaged (the
    momentum, here) would make it unlike again."""
    run = {"optimizer": "sgd", "load_codec": "float16", "target": 48}
    with training(pool, 2, average_opt_statistics=[["momentum_buffer"]] * 3, **run) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        wait_until(lambda: len(events(peers.all[0])) >= 3)
        [late] = peers.add(1)
        late.ask(Training.train, batch=8, pause=0.02)
        wait_until(lambda: sum(event["kind"] == "epoch" for event in events(late)) >= 4)
        states = stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    assert all(state["parameters_digest"] == states[0]["parameters_digest"] for state in states)
    # A download that took longer than an epoch is made again; none is once it was in one.
    kinds = [event["kind"] for event in reports[2]["events"]]
    assert kinds[0] == "download"
    assert "download" not in kinds[kinds.index("epoch") :], kinds
    assert all("compute alike" not in line for report in reports for line in report["log"])
