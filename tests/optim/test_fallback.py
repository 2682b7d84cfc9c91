"""Where no round can be had, a peer goes on alone, and the swarm is one again when it can be."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.swarm.protocol.tip import Tip
from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Training, ask_all, events, stopped, training
from tests.waiting import wait_until


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[list[shoal.Optimizer]]:
    """Two peers of one run, in this process."""
    arguments: dict[str, Any] = {
        "run_id": "pair",
        "target_batch_size": 64,
        "optimizer": OPTIMIZERS["adamw"],
        "scheduler": SCHEDULERS["steps"],
        **request.param,
    }
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        made = [shoal.Optimizer(dht=dht, params=make_model().parameters(), **arguments) for dht in (first, second)]
        yield made
        for optimizer in made:
            optimizer.shutdown()


def parameters(optimizer: shoal.Optimizer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in optimizer.param_groups[0]["params"]])


def give_gradients(optimizer: shoal.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def together(pair: list[shoal.Optimizer], batch_size: int) -> None:
    """One epoch of both, at the same time."""
    epoch = pair[0].local_epoch

    def steps(optimizer: shoal.Optimizer) -> None:
        if all(parameter.grad is None for parameter in optimizer.param_groups[0]["params"]):
            give_gradients(optimizer, epoch)
        optimizer.step(batch_size=batch_size)
        deadline = time.monotonic() + 60
        while optimizer.local_epoch == epoch and time.monotonic() < deadline:
            optimizer.step(batch_size=0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(steps, pair))


@pytest.mark.parametrize("pair", [{"matchmaking_time": 60.0, "averaging_timeout": 1.5}], indirect=True)
def test_going_on_without_an_answer(pair: list[shoal.Optimizer], caplog: pytest.LogCaptureFixture) -> None:
    first, second = pair
    start = parameters(second)
    give_gradients(first, 1)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "shoal"):
        first.step(batch_size=64)  # enough for both; but the other's trainer is busy elsewhere and does not join
    assert 1.5 <= time.monotonic() - started < 40
    assert "going on with this peer's own gradients" in caplog.text
    assert first.local_epoch == 1
    assert not torch.equal(parameters(first), start)
    assert torch.equal(parameters(second), start)

    wait_until(lambda: second._run.swarm.behind is not None)  # the other has told it where it is
    found: list[Any] = []
    second.on_event = found.append
    give_gradients(second, 2)
    second.step(batch_size=8)  # it comes back, and is told what it missed
    assert [type(event) for event in found] == [shoal.DownloadReport]
    assert second.local_epoch == 1
    assert torch.equal(parameters(second), parameters(first))
    assert second.scheduler is not None
    assert first.scheduler is not None
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    together(pair, 32)
    assert first.local_epoch == second.local_epoch == 2
    assert torch.equal(parameters(second), parameters(first))


@pytest.mark.parametrize("pair", [{}], indirect=True)
def test_state_from_peers_on_request(pair: list[shoal.Optimizer]) -> None:
    first, second = pair
    together(pair, 32)
    with torch.no_grad():
        for parameter in second.param_groups[0]["params"]:
            parameter.zero_()
    assert second.load_state_from_peers(timeout=60.0)
    assert torch.equal(parameters(second), parameters(first))
    with pytest.raises(TypeError, match="nonsense"):
        second.load_state_from_peers(nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="timeout"):
        second.load_state_from_peers(timeout=-1)
    # A state with fewer samples behind it is not taken.
    checkpoint = first.state_dict()
    checkpoint["state"]["local_epoch"], checkpoint["shoal"]["samples"] = 7, 10000.0
    first.load_state_dict(checkpoint)
    with contextlib.suppress(shoal.AveragingError):  # if the other has heard that it is behind, it offers nothing
        assert not first.load_state_from_peers()
    assert first.local_epoch == 7
    second.shutdown()
    assert not first.load_state_from_peers(), "there is nobody to ask"


@pytest.mark.parametrize("pair", [{}], indirect=True)
def test_who_leaves_while_asked_for_its_state_is_nobody_to_ask(
    pair: list[shoal.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    together(pair, 32)
    donors = first._run.donors()
    assert donors == [second.dht.peer_id]
    second.shutdown()
    answers = [donors]  # as if its LEAVE was on its way
    monkeypatch.setattr(first._run, "donors", lambda: answers.pop() if answers else type(first._run).donors(first._run))
    assert not first.load_state_from_peers()
    assert not answers


@pytest.mark.parametrize("pair", [{}], indirect=True)
def test_a_fault_in_one_peers_memory_is_found_and_mended(
    pair: list[shoal.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters that differ where they must not: the digests say so, and that peer downloads the state."""
    first, second = pair
    together(pair, 32)
    with torch.no_grad():
        second.param_groups[0]["params"][0][0, 0] += 1.0
    together(pair, 32)  # the digests of this round are from before the fault
    with caplog.at_level(logging.ERROR, "shoal"):
        together(pair, 32)
    assert "differ from those of peers that compute alike" in caplog.text
    assert torch.equal(parameters(second), parameters(first))
    assert first.local_epoch == second.local_epoch == 3


@pytest.mark.parametrize("pair", [{}], indirect=True)
def test_a_better_state_that_nobody_has_any_more_is_forgotten(pair: list[shoal.Optimizer]) -> None:
    """A member told of it and was gone before anybody could download it: nobody waits for it for ever."""
    together(pair, 32)
    for optimizer, other in zip(pair, reversed(pair), strict=True):
        tip = optimizer._run.swarm.tip.after(bytes(32), 1e6).after(bytes(32), 1e6)

        async def told(optimizer: shoal.Optimizer = optimizer, other: shoal.Optimizer = other, tip: Tip = tip) -> None:
            optimizer._run.swarm.peer.told(other.dht.peer_id.key, tip, time.monotonic())
            assert optimizer._run.swarm.behind == tip  # here: the other soon says again where it is

        optimizer.dht.reactor.run(told())
    for optimizer in pair:
        optimizer.step(batch_size=0)
        assert optimizer._run.swarm.behind is None
    together(pair, 32)
    assert pair[0].local_epoch == pair[1].local_epoch == 2
    assert torch.equal(parameters(pair[0]), parameters(pair[1]))


@pytest.mark.long
def test_one_goes_on_while_the_others_hang(pool: Pool) -> None:
    timeouts = {"averaging_timeout": 4.0, "next_chunk_timeout": 2.0, "awaits_others": True}
    with training(pool, 3, optimizer="adamw", **timeouts) as peers:
        last, *others = peers.all
        ask_all(peers.all, Training.train, batch=16, pause=0.03)
        wait_until(lambda: len(events(last)) >= 3)
        for peer in others:
            peer.hang()
        hung = time.monotonic()
        wait_until(lambda: sum(e["kind"] == "epoch" and e["peers"] == 1 and e["time"] > hung for e in events(last)) > 4)
        for peer in others:
            peer.go_on()
        woke = time.monotonic()

        def one_again() -> bool:
            return all(any(e.get("peers") == 3 and e["time"] > woke for e in events(peer)) for peer in peers.all)

        wait_until(one_again)
        states = stopped(peers.all)
    assert all(state == states[0] for state in states), states


def test_two_runs_on_one_dht(dht: shoal.DHT) -> None:
    """Each for itself, as two models of one script are."""
    models = [make_model(1), make_model(2)]
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other:
        optimizers = [
            shoal.Optimizer(
                dht=dht, run_id=name, target_batch_size=64, params=model.parameters(), optimizer=OPTIMIZERS["sgd"]
            )
            for name, model in zip(("red", "blue"), models, strict=True)
        ]
        twin = make_model(3)
        second_blue = shoal.Optimizer(
            dht=other, run_id="blue", target_batch_size=64, params=twin.parameters(), optimizer=OPTIMIZERS["sgd"]
        )
        for optimizer, model in zip(optimizers, models, strict=True):
            backward(model, *fixed_batch(0))
            if optimizer.run_id == "red":
                optimizer.step(batch_size=64)
        backward(twin, *fixed_batch(0))
        together([optimizers[1], second_blue], 32)
        assert optimizers[0].local_epoch == optimizers[1].local_epoch == second_blue.local_epoch == 1
        assert torch.equal(flat(twin), flat(models[1]))
        assert not torch.equal(flat(models[0]), flat(models[1]))
        optimizers[0].shutdown()
        together([optimizers[1], second_blue], 32)
        assert second_blue.local_epoch == 2
        second_blue.shutdown()
        optimizers[1].shutdown()
