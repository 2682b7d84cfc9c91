"""Nothing that sets options of the groups on one peer splits a run: all step with those that most peers hold."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, stopped, training
from tests.waiting import wait_until

Peers = list[tuple[torch.nn.Module, shoal.Optimizer]]

NOTICE = "lr of the parameter groups changes between steps of one epoch"
MODES: dict[str, dict[str, Any]] = {
    "at once": {},
    "offloaded": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed": {"delay_grad_averaging": True},
}


@pytest.mark.parametrize(
    "mode", ["at once", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("delayed step", "delayed"))]
)
def test_a_scheduler_that_follows_each_peers_own_steps(pool: Pool, mode: str) -> None:
    """Trainer's default: a LambdaLR on the Shoal optimizer, stepped after each batch by peers of unequal speed."""
    with training(pool, 2, optimizer="adamw", outside="each step", target=64, **MODES[mode]) as peers:
        quick, slow = peers.all
        quick.ask(Training.train, batch=4, pause=0.01)
        slow.ask(Training.train, batch=4, pause=0.04)
        wait_until(lambda: len(events(slow)) >= 12)
        stopped(peers.all)
        reports = ask_all(peers.all, Training.report)
    histories = [report["events"] for report in reports]
    digests = by_epoch(histories)
    assert len(set(digests.values())) == len(digests) >= 12
    assert all(event["kind"] == "epoch" for history in histories for event in history), "a peer had to download"
    assert all(report["errors"] == [] for report in reports)
    for report in reports:
        told = [line for line in report["log"] if NOTICE not in line]
        assert len(report["log"]) - len(told) == 1, report["log"]
        assert len(told) <= 1, told
        assert all(re.match(r"lr is [\d.e-]+ here, and [\d.e-]+ at most peers of the run", line) for line in told)
    assert len(reports[1]["log"]) == 2, "the slower one's steps are fewer, and so are its samples"


def test_the_same_wrapped_follows_the_run(pool: Pool) -> None:
    """A newcomer, too, whose scheduler is at the beginning when it downloads the state."""
    with training(pool, 2, optimizer="sgd", outside="each epoch", target=64) as peers:
        for peer, pause in zip(peers.all, (0.01, 0.03), strict=True):
            peer.ask(Training.train, batch=8, pause=pause)
        wait_until(lambda: len(events(peers.all[1])) >= 6)
        [late] = peers.add(1, seed=5)
        late.ask(Training.train, batch=8, pause=0.02)
        wait_until(lambda: sum(event.get("peers") == 3 for event in events(late)) >= 4)
        last = max(event["epoch"] for peer in peers.all for event in events(peer)) + 3
        states = ask_all(peers.all, Training.stop, last)
        reports = ask_all(peers.all, Training.report)
    by_epoch([report["events"] for report in reports])
    assert [report["log"] for report in reports] == [[], [], []]
    rate = 0.05
    for _ in range(last):
        rate *= 0.9
    assert {state["rate"] for state in states} == {repr(rate)}


# -- in this process


@contextlib.contextmanager
def together(count: int, **arguments: Any) -> Iterator[Peers]:
    """`count` peers of one run; an argument that is a list has one item for each."""
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(shoal.DHT(start=True))]
        places += [stack.enter_context(shoal.DHT(places[0].get_visible_maddrs(), start=True)) for _ in range(count - 1)]
        made: Peers = []
        for number, place in enumerate(places):
            model = make_model()
            own = {key: value[number] if isinstance(value, list) else value for key, value in arguments.items()}
            given = {"run_id": "rates", "target_batch_size": 64, "optimizer": OPTIMIZERS["sgd"], **own}
            made.append((model, shoal.Optimizer(dht=place, **{"params": model.parameters(), **given})))
            stack.callback(made[-1][1].shutdown)
        yield made


def epoch_of(peers: Peers, epoch: int, shares: list[int]) -> None:
    """All peers' shares of a fixed batch, at the same time, until all are past the epoch."""
    inputs, outputs = fixed_batch(epoch)

    def steps(number: int) -> None:
        model, optimizer = peers[number]
        first = sum(shares[:number])
        part = slice(first, first + shares[number])
        backward(model, inputs[part], outputs[part])
        optimizer.step(batch_size=shares[number])
        while optimizer.local_epoch <= epoch:
            optimizer.step(batch_size=0)

    with ThreadPoolExecutor(len(peers)) as threads:
        list(threads.map(steps, range(len(peers))))


def plain(rates: list[float]) -> torch.Tensor:
    """One process that steps with these learning rates, one for each epoch."""
    model = make_model()
    local = OPTIMIZERS["sgd"](model.parameters())
    for epoch, rate in enumerate(rates):
        local.param_groups[0]["lr"] = rate
        backward(model, *fixed_batch(epoch))
        local.step()
    return flat(model)


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3)


def rates_of(*rates: float) -> list[Callable[[Any], torch.optim.Optimizer]]:
    return [functools.partial(sgd, lr=rate) for rate in rates]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_peer_that_differs_steps_with_the_others_and_says_so_once(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        together(3, optimizer=rates_of(0.05, 0.05, 0.5), **MODES[mode]) as peers,
    ):
        for epoch in range(3):
            epoch_of(peers, epoch, [8, 16, 40])
            assert torch.equal(flat(peers[0][0]), flat(peers[1][0]))
            assert torch.equal(flat(peers[0][0]), flat(peers[2][0]))
        if mode in ("at once", "offloaded"):
            torch.testing.assert_close(flat(peers[0][0]), plain([0.05] * 3), rtol=1e-4, atol=1e-6)
        assert [optimizer.param_groups[0]["lr"] for _, optimizer in peers] == [0.05, 0.05, 0.5], "a vote lasts"
    told = [line for line in caplog.messages if "at most peers" in line]
    assert len(told) == 1
    assert told[0].startswith("lr is 0.5 here, and 0.05 at most peers of the run")


def test_of_two_that_differ_the_one_with_more_samples_counts_and_a_vote_lasts() -> None:
    """So options may be changed on one peer after the other."""
    with together(2, optimizer=rates_of(0.05, 0.02)) as peers:
        epoch_of(peers, 0, [24, 40])
        epoch_of(peers, 1, [40, 24])
        peers[0][1].param_groups[0]["lr"] = 0.02
        epoch_of(peers, 2, [40, 24])
        assert torch.equal(flat(peers[0][0]), flat(peers[1][0]))
        torch.testing.assert_close(flat(peers[0][0]), plain([0.02, 0.05, 0.02]), rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_who_missed_the_round_steps_with_its_options() -> None:
    """It fetches BEGIN with the result."""
    with together(2, optimizer=rates_of(0.05, 0.5), matchmaking_time=1.0) as peers:
        (model, optimizer), (late_model, late) = peers
        epoch_of(peers, 0, [40, 24])
        inputs, outputs = fixed_batch(1)
        backward(model, inputs, outputs)
        backward(late_model, inputs, outputs)
        late.step(batch_size=8)
        heard: list[Any] = []
        late.on_event = heard.append
        while optimizer.local_epoch < 2:  # without the other, whose trainer is busy
            optimizer.step(batch_size=32)
        while late.local_epoch < 2:
            late.step(batch_size=0)
        assert [type(event) for event in heard] == [shoal.EpochReport]
        assert torch.equal(flat(model), flat(late_model))


def test_a_newcomer_takes_over_the_options_of_the_run() -> None:
    """As they were at the state that it downloads, whatever users have written since."""
    with together(2, optimizer=rates_of(0.05, 0.05)) as peers:
        epoch_of(peers, 0, [40, 24])
        peers[0][1].param_groups[0]["lr"] = 7.0
        address = peers[0][1].dht.get_visible_maddrs()
        with shoal.DHT(address, start=True) as place:
            model = make_model(seed=3)
            late = shoal.Optimizer(
                dht=place,
                run_id="rates",
                target_batch_size=64,
                params=model.parameters(),
                optimizer=rates_of(0.9)[0],
            )
            late.step(batch_size=0)
            assert late.local_epoch == 1
            assert late.param_groups[0]["lr"] == 0.05
            assert torch.equal(flat(model), flat(peers[0][0]))
            late.shutdown()


def many_groups(rates: list[float]) -> tuple[Any, Any]:
    """A model of so many layers that their learning rates do not fit in a JOIN, and what makes its groups."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in rates))
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    return layers, groups


@pytest.mark.long
def test_rates_that_do_not_fit_are_compared_by_their_hash(caplog: pytest.LogCaptureFixture) -> None:
    """One that differs downloads the state of the others, and their options with it."""
    usual, other = [0.001 * (n + 1) for n in range(150)], [0.002 * (n + 1) for n in range(150)]
    models, groups = zip(*(many_groups(rates) for rates in (usual, usual, other)), strict=True)
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        together(3, params=list(groups), optimizer=lambda params: torch.optim.SGD(params, lr=1.0)) as made,
    ):
        peers = [(model, optimizer) for model, (_, optimizer) in zip(models, made, strict=True)]
        heard: list[Any] = []
        peers[2][1].on_event = heard.append

        def one(number: int, epoch: int) -> None:
            model, optimizer = peers[number]
            model.zero_grad()
            model(torch.ones(1, 2) * (number + 1)).sum().backward()
            optimizer.step(batch_size=24)
            while optimizer.local_epoch <= epoch:
                optimizer.step(batch_size=0)

        for epoch in range(3):
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(one, range(3), [epoch] * 3))
            assert torch.equal(flat(peers[0][0]), flat(peers[2][0]))
            assert torch.equal(flat(peers[0][0]), flat(peers[1][0]))
        assert [type(event) for event in heard] == [shoal.DownloadReport, shoal.EpochReport, shoal.EpochReport]
        assert [group["lr"] for group in peers[2][1].param_groups] == usual
    told = [line for line in caplog.messages if "takes too much to be told" in line]
    assert len(told) == 1
    assert told[0].startswith("lr of the parameter groups differs")


# -- one peer


Alone = Callable[..., shoal.Optimizer]


def steps(optimizer: shoal.Optimizer, model: torch.nn.Module, *schedules: Any, count: int, batch: int = 16) -> None:
    for number in range(count):
        backward(model, *fixed_batch(number))
        optimizer.step(batch_size=batch)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("mode", MODES)
def test_scheduler_wins_over_a_frameworks(alone: Alone, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    stepped = {
        "optimizer": rates_of(0.05)[0],
        "scheduler": lambda wrapped: torch.optim.lr_scheduler.ExponentialLR(wrapped, gamma=0.5),
    }
    optimizer = alone(model, target_batch_size=64, **stepped, **MODES[mode])
    frameworks = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step)
    rates: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda local, *_: rates.append(local.param_groups[0]["lr"]))
    with caplog.at_level(logging.WARNING, "shoal"):
        while optimizer.local_epoch < 4:
            steps(optimizer, model, frameworks, count=1)
    assert rates[:4] == [0.05, 0.025, 0.0125, 0.00625]
    told = [line for line in caplog.messages if "scheduler= wins" in line]
    assert len(told) == 1
    assert re.match(r"lr of the parameter groups was set to .*, and scheduler= has made it 0\.05", told[0])
    assert NOTICE not in caplog.text


def test_scheduler_wins_with_local_updates(alone: Alone) -> None:
    """There each step is made with this peer's own options, and what `scheduler=` makes of them."""
    model = make_model()
    optimizer = alone(
        model,
        target_batch_size=32,
        optimizer=rates_of(0.05)[0],
        scheduler=lambda wrapped: torch.optim.lr_scheduler.ExponentialLR(wrapped, gamma=0.5),
        use_local_updates=True,
        delay_state_averaging=False,
    )
    rates: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda local, *_: rates.append(local.param_groups[0]["lr"]))
    frameworks = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step)
    steps(optimizer, model, frameworks, count=4)
    assert rates == [0.05, 0.05, 0.025, 0.025]


def test_momentum_that_scheduler_sets_is_its_own_too(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(
        model,
        target_batch_size=16,
        optimizer=rates_of(0.05)[0],
        scheduler=lambda wrapped: torch.optim.lr_scheduler.OneCycleLR(wrapped, max_lr=0.1, total_steps=20),
    )
    plain_model = make_model()
    local = rates_of(0.05)[0](plain_model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(local, max_lr=0.1, total_steps=20)
    for number in range(6):
        steps(optimizer, model, count=1)
        local.step()
        schedule.step()
        group = local.param_groups[0]
        assert [optimizer.param_groups[0][name] for name in ("lr", "momentum")] == [group["lr"], group["momentum"]]
        if number:
            optimizer.param_groups[0]["momentum"] = 0.1


def test_a_scheduler_on_local_steps_is_noticed_once(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=rates_of(0.05)[0])
    with caplog.at_level(logging.WARNING, "shoal"):
        frameworks = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        steps(optimizer, model, frameworks, count=12)
    assert len(caplog.messages) == 1
    assert NOTICE in caplog.text
    assert "shoal.EpochScheduler" in caplog.text
    assert "scheduler=" in caplog.text


def test_who_sets_a_rate_once_an_epoch_is_not_told(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=rates_of(0.05)[0])
    mine = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with caplog.at_level(logging.WARNING, "shoal"):
        for number in range(12):
            steps(optimizer, model, count=1)
            if number % 4 == 1:  # in the middle of an epoch
                mine.step()
    assert caplog.messages == []
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8
