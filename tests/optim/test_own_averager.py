"""`grad_averager_factory` where its rounds fail, are tried again, or are not everybody's; and ends of epochs in the
background that find no average."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.optim.rounds import AveragerRounds
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, gaps, training
from tests.waiting import wait_until


def make(dht: shoal.DHT, **arguments: Any) -> tuple[torch.nn.Module, shoal.Optimizer]:
    model = make_model()
    given: dict[str, Any] = {
        "run_id": "own",
        "target_batch_size": 64,
        "optimizer": OPTIMIZERS["sgd"],
        "grad_averager_factory": shoal.GradientAverager,
        **arguments,
    }
    return model, shoal.Optimizer(dht=dht, params=model.parameters(), **given)


@pytest.fixture
def places() -> Iterator[list[shoal.DHT]]:
    with shoal.DHT(start=True) as first:
        addresses = first.get_visible_maddrs()
        with shoal.DHT(addresses, start=True) as second, shoal.DHT(addresses, start=True) as third:
            yield [first, second, third]


SHARES = [slice(0, 40), slice(40, 64)]


def epoch_of(pair: list[tuple[torch.nn.Module, shoal.Optimizer]], epoch: int) -> None:
    """Both peers' shares of a fixed batch, at the same time, until both are past the epoch."""
    inputs, outputs = fixed_batch(epoch)

    def steps(number: int) -> None:
        model, optimizer = pair[number]
        backward(model, inputs[SHARES[number]], outputs[SHARES[number]])
        optimizer.step(batch_size=len(inputs[SHARES[number]]))
        deadline = time.monotonic() + 60
        while optimizer.local_epoch <= epoch:
            assert time.monotonic() < deadline, "the epoch did not end"
            optimizer.step(batch_size=0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(steps, range(2)))


def own_gradients(optimizer: shoal.Optimizer) -> AveragerRounds:
    assert isinstance(optimizer._rounds, AveragerRounds)
    return optimizer._rounds


def averager_of(optimizer: shoal.Optimizer) -> shoal.GradientAverager:
    averager = optimizer.grad_averager
    assert isinstance(averager, shoal.GradientAverager)
    return averager


def plain(epochs: int) -> torch.Tensor:
    model = make_model()
    local = OPTIMIZERS["sgd"](model.parameters())
    for epoch in range(epochs):
        backward(model, *fixed_batch(epoch))
        local.step()
    return flat(model)


def test_who_only_downloads_is_not_waited_for(places: list[shoal.DHT]) -> None:
    pair = [make(place, matchmaking_time=100.0) for place in places[:2]]
    epoch_of(pair, 0)
    late_model, late = make(places[2], matchmaking_time=100.0)  # as while it loads its data
    started = time.monotonic()
    epoch_of(pair, 1)
    assert time.monotonic() - started < 60.0
    late.step(batch_size=0)
    assert late.local_epoch == 2
    assert torch.equal(flat(late_model), flat(pair[0][0]))
    torch.testing.assert_close(flat(late_model), plain(2), rtol=1e-4, atol=1e-6)
    for optimizer in (pair[0][1], pair[1][1], late):
        optimizer.shutdown()


def test_who_has_another_average_downloads_the_state(places: list[shoal.DHT]) -> None:
    pair = [make(place, matchmaking_time=20.0) for place in places[:2]]
    epoch_of(pair, 0)
    events: list[list[Any]] = [[], []]
    for (_, optimizer), heard in zip(pair, events, strict=True):
        optimizer.on_event = heard.append
    gradients = own_gradients(pair[1][1])
    average = gradients.average

    def lose_the_average(timeout: float, ended: Any) -> bytes:
        average(timeout, ended)
        with averager_of(pair[1][1]).get_tensors() as tensors:
            torch._foreach_mul_(list(tensors), 2.0)
        gradients._control = None
        return average(timeout, ended)

    gradients.average = lose_the_average  # type: ignore[method-assign]
    epoch_of(pair, 1)
    gradients.average = average  # type: ignore[method-assign]
    assert [type(event) for event in events[0]] == [shoal.EpochReport]
    assert [type(event) for event in events[1]] == [shoal.DownloadReport], "it stepped with gradients of its own"
    assert events[0][0].state_digest == events[1][0].state_digest
    epoch_of(pair, 2)
    assert type(events[1][-1]) is shoal.EpochReport
    assert torch.equal(flat(pair[0][0]), flat(pair[1][0]))
    for _, optimizer in pair:
        optimizer.shutdown()


def test_an_average_that_was_had_is_kept(places: list[shoal.DHT]) -> None:
    """Where the round that follows it fails."""
    pair = [make(place, matchmaking_time=2.0, averaging_timeout=5.0, min_peers=2) for place in places[:2]]
    rounds = [0, 0]
    for number, (_, optimizer) in enumerate(pair):
        averager = averager_of(optimizer)

        def step(*args: Any, number: int = number, held: Any = averager.step, **kwargs: Any) -> Any:
            rounds[number] += 1
            return held(*args, **kwargs)

        averager.step = step  # type: ignore[method-assign]
    run = pair[0][1]._run
    average, failures = run.average, list[float]()

    def fails_first(contribution: Any, timeout: float) -> Any:
        if not failures:
            time.sleep(timeout)
            failures.append(time.monotonic())
            raise shoal.AveragingError("the network is away")
        return average(contribution, timeout)

    run.average = fails_first  # type: ignore[method-assign]
    epoch_of(pair, 0)
    assert failures
    assert rounds == [1, 1], "the gradients were averaged again"
    assert torch.equal(flat(pair[0][0]), flat(pair[1][0]))
    torch.testing.assert_close(flat(pair[0][0]), plain(1), rtol=1e-4, atol=1e-6)
    for _, optimizer in pair:
        optimizer.shutdown()


def test_nothing_is_averaged_before_enough_peers_are_there(places: list[shoal.DHT]) -> None:
    model, optimizer = make(places[0], matchmaking_time=0.5, min_peers=2)
    for _ in range(2):
        backward(model, *fixed_batch(0))
        optimizer.step(batch_size=64)
    assert averager_of(optimizer).last_round is None
    assert own_gradients(optimizer)._control is None
    assert optimizer.tracker.local_progress.samples_accumulated == 128
    optimizer.shutdown()


def test_gradients_that_are_not_finite_stay_at_home(places: list[shoal.DHT]) -> None:
    pair = [make(place) for place in places[:2]]
    inputs, outputs = fixed_batch(0)
    backward(pair[1][0], inputs[40:] * float("nan"), outputs[40:])
    pair[1][1].step(batch_size=24)

    def steps(number: int) -> None:
        model, optimizer = pair[number]
        if number == 0:
            backward(model, inputs[:40], outputs[:40])
            optimizer.step(batch_size=40)
        while optimizer.local_epoch == 0:
            optimizer.step(batch_size=0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(steps, range(2)))
    alone = make_model()
    backward(alone, inputs[:40], outputs[:40])
    OPTIMIZERS["sgd"](alone.parameters()).step()
    for model, optimizer in pair:
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-6)
        optimizer.shutdown()


def test_other_averagers_are_refused_by_name(places: list[shoal.DHT]) -> None:
    _, first = make(places[0])
    _, second = make(places[1])

    other = functools.partial(shoal.PowerSGDGradientAverager, averager_rank=2)
    with pytest.raises(shoal.AveragingError, match=r"grad_averager_factory is PowerSGDG.*averager_rank"):
        make(places[2], grad_averager_factory=other)
    first.shutdown()
    second.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("factory", [None, shoal.GradientAverager])
def test_min_peers_never_holds_the_trainer_for_ever(places: list[shoal.DHT], factory: Any) -> None:
    """Where the average is had in the background."""
    options = {"matchmaking_time": 0.5, "averaging_timeout": 1.5, "min_peers": 2, "delay_grad_averaging": True}
    model, first = make(places[0], grad_averager_factory=factory, **options)
    for _ in range(3):
        backward(model, *fixed_batch(0))
        began = time.monotonic()
        first.step(batch_size=16)
        assert time.monotonic() - began < 40.0
    other_model, second = make(places[1], grad_averager_factory=factory, **options)  # there, but it does not join
    for _ in range(6):
        backward(model, *fixed_batch(0))
        began = time.monotonic()
        first.step(batch_size=32)
        assert time.monotonic() - began < 40.0
    assert first.local_epoch == 0
    reports: list[Any] = []
    first.on_event = reports.append
    backward(other_model, *fixed_batch(0))
    second.step(batch_size=64)
    deadline = time.monotonic() + 60
    while not (first.local_epoch and second.local_epoch):
        assert time.monotonic() < deadline
        for optimizer in (first, second):
            optimizer.step(batch_size=0)
        time.sleep(0.01)
    assert reports[0].samples >= 64 + 16, "what it had for that epoch was lost"
    assert torch.equal(flat(model), flat(other_model))
    for optimizer in (first, second):
        optimizer.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("GradientAverager", {}),
        ("PowerSGDGradientAverager", {"delay_grad_averaging": True}),
    ],
)
def test_a_kill_and_a_newcomer(pool: Pool, kind: str, option: dict[str, Any]) -> None:
    with training(pool, 3, optimizer="adamw", own_averager=kind, **option) as peers:
        *survivors, victim = peers.all
        ask_all(peers.all, Training.train, batch=8, pause=0.1)
        wait_until(lambda: len(events(survivors[0])) >= 4)
        victim.process.kill()
        victim.process.wait(100)
        wait_until(lambda: sum(event.get("peers") == 2 for event in events(survivors[0])) >= 4)
        [late] = peers.add(1, seed=4)
        late.ask(Training.train, batch=8, pause=0.1)
        wait_until(lambda: sum(event.get("peers") == 3 for event in events(late)) >= 4)
        living = [*survivors, late]
        last = max(event["epoch"] for peer in living for event in events(peer)) + 3
        states = ask_all(living, Training.stop, last)
        histories = [events(peer) for peer in living]
    by_epoch(histories)
    # One that trains on during a round may have begun the end of another epoch when it was told to stop.
    assert all(a == b for a in states for b in states if a["epoch"] == b["epoch"])
    assert {state["epoch"] for state in states} <= {last, last + 1}
    for history in histories[:2]:
        assert all(event["kind"] == "epoch" for event in history), "a survivor had to download"
        until_told = [event for event in history if event["epoch"] <= last]  # then some wait for others that stop
        assert max(length for _, length in gaps(until_told)) < 10.0, "somebody was waited for who did not train"
    # It downloads again, maybe often, where the others average their gradients before it has the state that they are
    # of; but not any more once it was in an epoch.
    kinds = [event["kind"] for event in histories[2]]
    assert kinds[0] == "download"
    assert "download" not in kinds[kinds.index("epoch") :], histories[2]
