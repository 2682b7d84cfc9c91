"""Arguments that make no sense, alone or together, are refused by name before anything starts."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.reports import EpochReport
from tests.optim.models import backward, fixed_batch, make_model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module")
def started() -> Any:
    with shoal.DHT(start=True) as dht:
        yield dht


def make(dht: shoal.DHT, **arguments: Any) -> shoal.Optimizer:
    model = make_model()
    given = {"run_id": "r", "target_batch_size": 8, "params": model.parameters(), "optimizer": sgd, **arguments}
    return shoal.Optimizer(dht=dht, **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", ""),
        ("run_id", "x" * 101),
        ("run_id", 5),
        ("target_batch_size", 0),
        ("target_batch_size", float("nan")),
        ("target_batch_size", "64"),
        ("target_batch_size", None),
        ("batch_size_per_step", -1),
        ("matchmaking_time", 0),
        ("matchmaking_time", float("inf")),
        ("averaging_timeout", -5),
        ("averaging_timeout", None),
        ("allreduce_timeout", 0),
        ("next_chunk_timeout", float("nan")),
        ("load_state_timeout", "soon"),
        ("shutdown_timeout", 0),
        ("performance_ema_alpha", 0),
        ("performance_ema_alpha", 1.5),
        ("grad_compression", "float16"),
        ("grad_compression", shoal.compression.Float16Compression),
        ("state_averaging_compression", "float16"),
        ("load_state_compression", 16),
        ("average_state_every", 0),
        ("average_state_every", 1.5),
        ("average_state_every", True),
        ("min_peers", 0),
        ("min_peers", "all"),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", float("inf")),
        ("average_opt_statistics", [5]),
        ("average_opt_statistics", "momentum_buffer"),
        ("averager_opts", {"averaging_alpha": 0.5}),
        ("initial_group_bits", {"initial_group_bits": "01"}),
        ("averager_opts", {"allreduce_timeout": 5.0}),
        ("averager_opts", {"min_group_size": 0}),
        ("averager_opts", {"min_group_size": True}),
        ("averager_opts", {"sender_timeout": 0}),
        ("averager_opts", {"reducer_timeout": "soon"}),
        ("averager_opts", {"allow_state_sharing": 1}),
        ("averager_opts", {"bandwidth": -1}),
        ("averager_opts", {"request_timeout": 0}),
        ("tracker_opts", {"refresh": 1}),
        ("optimizer", "sgd"),
        ("optimizer", lambda params: 5),
        ("params", None),
        ("scheduler", 5),
        ("scheduler", lambda optimizer: 5),
        ("scheduler", torch.optim.lr_scheduler.ReduceLROnPlateau),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(started: shoal.DHT, name: str, value: Any) -> None:
    before = threading.enumerate()
    argument = name if not isinstance(value, dict) or name == "tracker_opts" else "averager_opts"
    with pytest.raises(ValueError, match=name):
        make(started, **{argument: value})
    assert threading.enumerate() == before


def test_combinations(started: shoal.DHT) -> None:
    local = sgd(make_model().parameters())
    with pytest.raises(ValueError, match="leave params= out"):
        make(started, optimizer=local)
    other = torch.optim.lr_scheduler.StepLR(sgd(make_model().parameters()), 1)
    with pytest.raises(ValueError, match="scheduler= is of another optimizer"):
        make(started, optimizer=local, params=None, scheduler=other)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make(started, params=frozen.parameters())
    tied = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="share memory"):
        make(started, params=[tied, nn.Parameter(tied.data[:2])])
    with (
        shoal.DHT(started.get_visible_maddrs(), start=True, client_mode=True) as client,
        pytest.raises(ValueError, match="client_mode=False"),
    ):
        make(client, client_mode=False)
    with pytest.raises(RuntimeError, match="not started"):
        make(shoal.DHT())


CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"delay_grad_averaging": True, "delay_optimizer_step": False}, ["delay_grad_averaging", "delay_optimizer_step"]),
    ({"delay_optimizer_step": True, "offload_optimizer": False}, ["delay_optimizer_step", "offload_optimizer"]),
    ({"use_local_updates": True, "reuse_grad_buffers": True}, ["use_local_updates", "reuse_grad_buffers"]),
    ({"use_local_updates": True, "delay_grad_averaging": True}, ["use_local_updates", "delay_grad_averaging"]),
    ({"use_local_updates": True, "delay_optimizer_step": True}, ["use_local_updates", "delay_optimizer_step"]),
    ({"use_local_updates": True, "offload_optimizer": True}, ["use_local_updates", "offload_optimizer"]),
    ({"use_local_updates": True, "max_grad_norm": 1.0}, ["use_local_updates", "max_grad_norm"]),
    ({"use_local_updates": True, "grad_averager_factory": object}, ["use_local_updates", "grad_averager_factory"]),
    ({"auxiliary": True, "client_mode": True}, ["auxiliary", "client_mode"]),
    ({"auxiliary": True, "batch_size_per_step": 4}, ["auxiliary", "batch_size_per_step"]),
    ({"auxiliary": True, "averager_opts": {"allow_state_sharing": True}}, ["allow_state_sharing", "auxiliary"]),
]


@pytest.mark.parametrize(("arguments", "names"), CONTRADICTIONS, ids=lambda value: " ".join(value))
def test_contradictions_name_both(started: shoal.DHT, arguments: dict[str, Any], names: list[str]) -> None:
    before = threading.enumerate()
    with pytest.raises(ValueError, match=names[0]) as caught:
        make(started, **arguments)
    assert all(name in str(caught.value) for name in names)
    assert threading.enumerate() == before


def test_an_offloaded_optimizer_is_made_here(started: shoal.DHT) -> None:
    local = sgd(make_model().parameters())
    with pytest.raises(ValueError, match=r"offload_optimizer.*as a function"):
        make(started, optimizer=local, params=None, offload_optimizer=True)


def test_values_that_change_nothing_are_taken(started: shoal.DHT) -> None:
    """Scripts for hivemind pass them."""
    optimizer = make(
        started,
        offload_optimizer=False,
        delay_optimizer_step=False,
        delay_state_averaging=False,
        average_opt_statistics=[],
        averager_opts={},
        tracker_opts={},
        grad_compression=None,
        state_averaging_compression=shoal.compression.NoCompression(),
        load_state_compression=shoal.compression.NoCompression(),
    )
    optimizer.shutdown()


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_numbers_of_numpy_are_taken(started: shoal.DHT, kind: str) -> None:
    """They are computed from other numbers, and some of them are sent to others, which msgpack can't do."""
    number = getattr(pytest.importorskip("numpy"), kind)
    model = make_model()
    optimizer = make(
        started,
        run_id=f"numpy {kind}",
        params=model.parameters(),
        target_batch_size=number(8),
        matchmaking_time=number(1),
        averaging_timeout=number(20),
        averager_opts={"bandwidth": number(3)},
        tracker_opts={"min_refresh_period": number(1)},
    )
    events: list[object] = []
    optimizer.on_event = events.append
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=number(8))
    optimizer.shutdown()
    assert [type(event) for event in events] == [EpochReport]  # of a round; without one it would go on alone


def test_verbose_tells_of_every_epoch_in_a_line_to_read(started: shoal.DHT, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("shoal")
    level = logger.level
    model = make_model()
    try:
        optimizer = make(started, run_id="verbose", verbose=True, params=model.parameters())
        backward(model, *fixed_batch(0))
        optimizer.step(batch_size=8)
        optimizer.shutdown()
    finally:
        logger.setLevel(level)
    line = (
        r"epoch 1: 8 samples of 1 peer, round \d+\.\d{3} s \(matchmaking \d+\.\d{3} s, all-reduce \d+\.\d{3} s\), "
        r"\d+ B sent, \d+ B received, state [0-9a-f]{8}, tip 1:8:[0-9a-f]{64}"
    )
    assert [message for message in caplog.messages if re.fullmatch(line, message)], caplog.messages
    assert "EpochReport(" not in caplog.text


@pytest.mark.parametrize(("count", "told"), [(512, "512 B"), (4_120, "4.1 kB"), (4_100_000, "4.1 MB")])
def test_a_download_is_told_in_one_line(count: int, told: str) -> None:
    report = shoal.DownloadReport(epoch=3, seconds=0.5, bytes=count, donors=2, state_digest="12ab" * 16)
    assert str(report) == f"downloaded the state of epoch 3 from 2 peers: {told} in 0.50 s, state 12ab12ab"


def test_an_optimizer_whose_step_needs_a_closure_is_refused(started: shoal.DHT) -> None:
    before = threading.enumerate()
    says = (
        r"optimizer= is a LBFGS, whose step evaluates the loss again .*choose an optimizer whose step needs no closure"
    )
    with pytest.raises(ValueError, match=says):
        make(started, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match=says):
        make(started, optimizer=torch.optim.LBFGS(make_model().parameters()), params=None)
    with pytest.raises(ValueError, match=says):
        shoal.TrainingStateAverager(
            dht=started, prefix="lbfgs", start=False, optimizer=torch.optim.LBFGS, params=make_model().parameters()
        )
    assert threading.enumerate() == before
