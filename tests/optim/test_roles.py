"""Clients and auxiliaries: exact averages for those who can't be dialled, bandwidth from those who train nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blake3 import blake3

import shoal
from shoal.flat import bytes_of
from tests.optim.models import OPTIMIZERS, make_model, train_alone
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, fixed, training
from tests.waiting import wait_until

SHARES = [(0, 8), (8, 40), (40, 64)]
EPOCHS = 6


@pytest.mark.parametrize(
    "dht_client", [True, pytest.param(False, marks=pytest.mark.long)], ids=["no listening DHT", "a listening DHT"]
)
def test_a_swarm_of_clients_and_one_node(pool: Pool, dht_client: bool) -> None:
    with training(
        pool,
        3,
        optimizer="adamw",
        scheduler="cosine",
        dht_client=[False, dht_client, dht_client],
        client_mode=[None, True, True],
    ) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS)
        histories = [events(peer) for peer in peers.all]
        node = peers.all[0].peer
        roles = ask_all(peers.all, Training.terms)
    assert all(event["kind"] == "epoch" and event["peers"] == 3 for history in histories for event in history)
    assert {event["coordinator"] for history in histories for event in history} == {node}
    by_epoch(histories)
    assert all(answer == answers[0] for answer in answers)
    alone = train_alone("adamw", "cosine", EPOCHS)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), alone, rtol=1e-4, atol=1e-5)
    # A client sends its gradients once, and the average to nobody.
    sizes = [sum(event["sent"] for event in history) for history in histories]
    assert sizes[1] < 0.7 * sizes[0], sizes
    assert [role["addresses"] for role in roles[1:]] == [[], []]
    assert [role["listens"] for role in roles] == [True, not dht_client, not dht_client]


@pytest.mark.long
def test_an_auxiliary_reduces_and_adds_no_gradients(pool: Pool) -> None:
    with training(pool, 3, optimizer="sgd", auxiliary=[False, False, True], width=200, matchmaking_time=3.0) as peers:
        *trainers, helper = peers.all
        helper.ask(Training.train, batch=0, pause=0.0)
        answers = fixed(trainers, [(0, 24), (24, 64)], EPOCHS)
        wait_until(lambda: len(events(helper)) >= EPOCHS - 1)
        state = helper.ask(Training.stop)
        histories = [events(peer) for peer in peers.all]
    assert all(answer == answers[0] for answer in answers)
    alone = train_alone("sgd", "none", EPOCHS, width=200)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), alone, rtol=1e-4, atol=1e-5)
    by_epoch(histories[:2])
    assert all(event["samples"] == 64 for history in histories for event in history)
    helped = [event for event in histories[0] if event["peers"] == 3]
    assert len(helped) >= EPOCHS - 1, "the auxiliary was not in the rounds"
    assert all(event["sent"] > 0 for event in histories[2]), "it sent no averages"
    untouched = torch.cat([parameter.detach().flatten() for parameter in make_model(0, 200).parameters()])
    assert state["parameters_digest"] == blake3(bytes_of(untouched)).hexdigest(), "its own tensors were overwritten"


def test_an_auxiliary_takes_no_batches(alone: Callable[..., shoal.Optimizer]) -> None:
    optimizer = alone(
        make_model(), target_batch_size=8, optimizer=OPTIMIZERS["sgd"], auxiliary=True, matchmaking_time=0.2
    )
    for arguments in ({"batch_size": 8}, {"closure": lambda: None}, {"grad_scaler": shoal.GradScaler("cpu")}):
        with pytest.raises(ValueError, match="auxiliary"):
            optimizer.step(**arguments)
    optimizer.step()  # nobody trains: it returns
    assert optimizer.local_epoch == 0


def test_who_has_no_bandwidth_reduces_nothing(pool: Pool) -> None:
    with training(
        pool, 3, width=200, averager_opts=[{"bandwidth": 5.0}, {"bandwidth": 5.0}, {"bandwidth": 0.0}]
    ) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS)
        histories = [events(peer) for peer in peers.all]
    assert all(answer == answers[0] for answer in answers)
    rounds = [{event["epoch"]: event for event in history if event.get("peers") == 3} for history in histories]
    held = rounds[0].keys() & rounds[1].keys() & rounds[2].keys()  # a peer that came late may have missed one
    assert held
    # Each reducer of two sends half a vector as parts and twice half as averages, the third one vector of parts.
    sent = [sum(own[epoch]["sent"] for epoch in held) for own in rounds]
    assert sent[2] < 0.75 * min(sent[:2]), sent
