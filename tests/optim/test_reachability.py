"""A peer that trains alone, although it knows of others, says so in the log, in `on_event` and in its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import shoal


def optimizer_of(dht: shoal.DHT, run_id: str) -> shoal.Optimizer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=8,
        batch_size_per_step=8,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        matchmaking_time=0.5,
    )


def step(optimizer: shoal.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr("shoal.swarm.protocol.reach.PATIENCE", 1.0)
    with ExitStack() as stack:
        yield stack


def train(optimizers: list[shoal.Optimizer], heard: list[list[Any]], until: Callable[[Any], bool]) -> None:
    """Step each in turn until each has heard such a report of whom it reaches."""
    deadline = time.monotonic() + 60
    while not all(any(map(until, reports)) for reports in heard):
        assert time.monotonic() < deadline, heard
        for optimizer in optimizers:
            step(optimizer)
        time.sleep(0.05)


def listen(optimizer: shoal.Optimizer) -> tuple[list[Any], list[Any]]:
    """Where the reports of whom it reaches go, and those of epochs."""
    reaches: list[Any] = []
    epochs: list[Any] = []

    def hear(event: Any) -> None:
        kinds = {shoal.ReachabilityReport: reaches, shoal.EpochReport: epochs}
        kinds.get(type(event), []).append(event)

    optimizer.on_event = hear
    return reaches, epochs


def test_two_clients_without_a_node(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    first = stack.enter_context(shoal.DHT(start=True))  # which does not train
    clients = [stack.enter_context(shoal.DHT(first.get_visible_maddrs(), client_mode=True, start=True)) for _ in "12"]
    optimizers = [optimizer_of(dht, "run") for dht in clients]
    for optimizer in optimizers:
        stack.callback(optimizer.shutdown)
    heard = [listen(optimizer) for optimizer in optimizers]
    train(optimizers, [reaches for reaches, _ in heard], lambda report: bool(report.unreached))
    for optimizer, (reaches, epochs), other in zip(optimizers, heard, reversed(clients), strict=True):
        report = reaches[-1]  # it may have thought that it is alone, before it knew of the other
        assert (report.num_peers, report.unreached) == (1, (str(other.peer_id),))
        assert caplog.text.count(report.advice) == 1
        assert "the run needs a node" in report.advice
        assert {epoch.num_peers for epoch in epochs} == {1}
        progress = optimizer.tracker.global_progress
        assert (progress.num_peers, progress.num_clients) == (1, 1)


def test_a_wrong_run_id(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    first = stack.enter_context(shoal.DHT(start=True))
    second = stack.enter_context(shoal.DHT(first.get_visible_maddrs(), start=True))
    optimizer = optimizer_of(second, "rum")
    stack.callback(optimizer.shutdown)
    reaches, _ = listen(optimizer)
    train([optimizer], [reaches], lambda report: report.num_peers == 1)
    assert (reaches[0].num_peers, reaches[0].unreached) == (1, ())
    assert "this peer is alone in the run 'rum', while the DHT has 1 other node:" in reaches[0].advice
    assert caplog.text.count(reaches[0].advice) == 1
    other = optimizer_of(first, "rum")
    stack.callback(other.shutdown)
    train([optimizer], [reaches], lambda report: report.num_peers == 2)
    assert reaches[1] == shoal.ReachabilityReport(2, (), "")
