"""Options that must be equal in a run: the peer that differs is told which one does."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.compression import Float16Compression
from shoal.swarm import contacts
from shoal.swarm.protocol import messages
from tests.optim.models import OPTIMIZERS, SCHEDULERS, make_model

DIFFERING: dict[str, Any] = {
    "target_batch_size": 128,
    "optimizer": OPTIMIZERS["adamw"],
    "scheduler": SCHEDULERS["steps"],
    "delay_optimizer_step": True,
    "delay_grad_averaging": True,
    "delay_state_averaging": False,
    "average_state_every": 2,
    "use_local_updates": True,
    "grad_compression": Float16Compression(),
    "grad_averager_factory": shoal.GradientAverager,
    "state_averaging_compression": Float16Compression(),
    "load_state_compression": Float16Compression(),
    "average_opt_statistics": ["momentum_buffer"],
    "extra_tensors": [torch.zeros(3)],
    "max_grad_norm": 1.0,
    "min_peers": 2,
    "outer": shoal.DiLoCo(),
}
FREE: dict[str, Any] = {
    "batch_size_per_step": 4,
    "client_mode": True,
    "auxiliary": True,
    "reuse_grad_buffers": True,
    "offload_optimizer": True,
    "verbose": True,
    "matchmaking_time": 16.0,
    "averaging_timeout": 61.0,
    "allreduce_timeout": 30.0,
    "next_chunk_timeout": 6.0,
    "load_state_timeout": 60.0,
    "shutdown_timeout": 6.0,
    "averager_opts": {"request_timeout": 5.0},
    "tracker_opts": {"min_refresh_period": 0.25},
    "performance_ema_alpha": 0.2,
    "metrics_port": 0,
    "error_feedback": 1.0,
    "kept_state_dir": "no folder is made before a state is kept",
    "frozen_parameters": "own",  # compared only where there are some: tests/optim/test_frozen.py
    "wait_for_newcomers": 0.5,
    "max_state_bytes": 1 << 30,
}

SPELLINGS: list[dict[str, Any]] = [  # keys that are a peer's own, and other words for what the others have
    {"averager_opts": {"bandwidth": 2.0}},
    {"averager_opts": {"sender_timeout": 2.0, "reducer_timeout": 3.0, "allow_state_sharing": False}},
    {"averager_opts": {"target_group_size": 2, "part_size_bytes": 1 << 19, "min_vector_size": 1}},
    {"averager_opts": {"bandwidth": None, "min_group_size": 1, "declare_state_period": 30, "daemon": False}},
    {"averager_opts": {"min_matchmaking_time": 15.0, "request_timeout": 10}},
    {"tracker_opts": {"min_refresh_period": 0.5, "max_refresh_period": 10, "daemon": False}},
    {"tracker_opts": {"status_loglevel": logging.INFO}},
    {"target_batch_size": 64.0},
    {"averaging_timeout": 5.0, "allreduce_timeout": 3.0, "tracker_opts": {"expected_drift_peers": 10}},
]


def make(dht: shoal.DHT, **arguments: Any) -> shoal.Optimizer:
    given: dict[str, Any] = {"run_id": "agreed", "target_batch_size": 64, "optimizer": OPTIMIZERS["sgd"], **arguments}
    return shoal.Optimizer(dht=dht, **{"params": make_model().parameters(), **given})


def partly_frozen() -> list[torch.nn.Parameter]:
    parameters = list(make_model().parameters())
    parameters[0].requires_grad_(False)
    return parameters


def grouped() -> list[dict[str, Any]]:
    parameters = list(make_model().parameters())
    return [{"params": parameters[:2], "slow": True}, {"params": parameters[2:]}]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who differs is told so as soon as it has met the others."""
    monkeypatch.setattr(contacts, "ALONE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def running() -> Iterator[list[shoal.DHT]]:
    """Two peers of a run, and a DHT for a third."""
    with shoal.DHT(start=True) as first:
        addresses = first.get_visible_maddrs()
        with shoal.DHT(addresses, start=True) as second, shoal.DHT(addresses, start=True) as third:
            made = [make(first), make(second)]
            yield [third]
            for optimizer in made:
                optimizer.shutdown()


def test_every_option_is_one_or_the_other() -> None:
    options = set(inspect.signature(shoal.Optimizer).parameters)
    assert options - set(DIFFERING) - set(FREE) == {"dht", "run_id", "params", "membership", "cluster"}
    assert not set(DIFFERING) & set(FREE)


@pytest.mark.parametrize("name", DIFFERING)
def test_who_differs_is_told_in_what(running: list[shoal.DHT], name: str) -> None:
    with pytest.raises(shoal.AveragingError, match=f"{name} is .* here, and .* there"):
        make(running[0], **{name: DIFFERING[name]}).step(batch_size=1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"averager_opts": {"min_group_size": 2}}, "min_peers is 2 here, and 1 there"),
        (
            {"extra_tensors": [torch.zeros(3), torch.zeros((2, 4), dtype=torch.int64)]},
            "the number of extra_tensors is 2 here, and 0 there",
        ),
        (
            {"params": make_model(width=24).named_parameters()},
            "parameters[0] (0.weight) is float32[24, 10] here, and float32[20, 10] there",
        ),
        ({"params": make_model().double().parameters()}, "parameters[0] is float64[20, 10] here, and float32[20, 10]"),
        ({"params": make_model()[:4].parameters()}, "the number of parameters is 4 here, and 6 there"),
        (
            {"params": partly_frozen()},
            "the number of parameters is 5 here, and 6 there; parameters[0] is float32[20] here, and float32[20, 10] "
            "there",
        ),
        ({"params": grouped()}, "param_groups is 2 tensors, 4 tensors here, and 6 tensors there"),
    ],
    ids=lambda given: "" if isinstance(given, dict) else given[:40],
)
def test_what_differs_can_be_read(running: list[shoal.DHT], given: dict[str, Any], text: str) -> None:
    with pytest.raises(shoal.AveragingError, match=re.escape(text)):
        make(running[0], **given).step(batch_size=1)


def test_another_protocol_says_what_to_install(running: list[shoal.DHT], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = messages.PROTOCOL
    monkeypatch.setattr(messages, "PROTOCOL", "99")
    install = f"protocol is 99 here, and {theirs} there; .*: pip install 'shoal=={shoal.__version__}'"
    with pytest.raises(shoal.AveragingError, match=install):
        make(running[0]).step(batch_size=1)


def test_the_others_are_told_as_well(running: list[shoal.DHT], caplog: pytest.LogCaptureFixture) -> None:
    """By one line of each peer that was there; of one peer eight times a minute, so this is another one."""
    with shoal.DHT(running[0].get_visible_maddrs(), start=True) as dht:
        with caplog.at_level(logging.WARNING, "shoal"), pytest.raises(shoal.AveragingError):
            make(dht, params=make_model(width=22).parameters()).step(batch_size=1)
        text = "is in the run with other terms: parameters[0] is float32[20, 10] here, and float32[22, 10] there"
        deadline = time.monotonic() + 60
        while sum(text in line for line in caplog.messages) < 2:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)


@pytest.mark.parametrize("given", [{name: value} for name, value in FREE.items()] + SPELLINGS, ids=str)
def test_who_may_differ_is_let_in(running: list[shoal.DHT], given: dict[str, Any]) -> None:
    optimizer = make(running[0], **given)
    assert len(optimizer._run.swarm.peer.view.connected()) == 3
    optimizer.shutdown()


def test_of_two_alone_the_one_with_the_larger_key_ends_though_its_epoch_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes no reports any more, and no round, since it waits for `min_peers`."""
    monkeypatch.setattr(contacts, "ALONE_SECONDS", 0.0)
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        smaller, larger = sorted((first, second), key=lambda dht: dht.peer_id.key)
        given = {"min_peers": 2, "matchmaking_time": 0.2}
        with contextlib.ExitStack() as stack:
            ends = make(larger, **given)
            stack.callback(ends.shutdown)
            ends.step(batch_size=0)
            step_with_gradients(ends)
            assert ends.tracker.ready_to_update_epoch
            stays = make(smaller, target_batch_size=32, **given)
            stack.callback(stays.shutdown)
            until = time.monotonic() + 10
            with pytest.raises(shoal.AveragingError, match="target_batch_size is 64 here, and 32 there"):
                step_until(ends, until)
            stays.step(batch_size=0)


def step_until(optimizer: shoal.Optimizer, until: float) -> None:
    while time.monotonic() < until:
        optimizer.step(batch_size=0)


def step_with_gradients(optimizer: shoal.Optimizer) -> None:
    """Bring the whole target."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step(batch_size=64)
