"""Training through every compression: the peers stay alike in all bits, and learn what they learn without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.compression import (
    BlockwiseQuantization,
    Compression,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from shoal.optim.accumulator import EpochGradients
from tests.optim.models import flat, make_model, train_alone
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, fixed, stopped, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until

BY_SIZE = SizeAdaptiveCompression(100, Float16Compression(), Uniform8BitQuantization())
"""Of the model's six tensors two are large."""

BY_ROLE = RoleAdaptiveCompression(
    gradient=BY_SIZE, parameter=ScaledFloat16Compression(), optimizer=Float16Compression()
)
BY_TENSOR = PerTensorCompression([BY_SIZE, NoCompression(), Quantile8BitQuantization(), *[BlockwiseQuantization()] * 3])
LOSSY: list[Compression] = [
    Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization(),
    BlockwiseQuantization(), BY_SIZE, BY_ROLE, BY_TENSOR,
]  # fmt: skip
MARKS: dict[type[Compression], list[Any]] = {
    Uniform8BitQuantization: [],
    BlockwiseQuantization: [pytest.mark.long],
    PerTensorCompression: [pytest.mark.long],
}
ALL_BUT_ONE_LONG = [pytest.param(each, marks=MARKS.get(type(each), [pytest.mark.long, only_in_soak])) for each in LOSSY]
EPOCHS = 4
SHARES = [(0, 8), (8, 40), (40, 64)]


@pytest.mark.parametrize("compression", ALL_BUT_ONE_LONG, ids=lambda compression: type(compression).__name__)
def test_gradients_through_every_compression(pool: Pool, compression: Compression) -> None:
    with training(pool, 3, optimizer="sgd", codec=compression.spec) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS)
        histories = [events(peer) for peer in peers.all]
    assert all([event["kind"] for event in history] == ["epoch"] * EPOCHS for history in histories), histories
    assert len(by_epoch(histories)) == EPOCHS
    assert len({(answer["parameters_digest"], answer["statistics"]) for answer in answers}) == 1
    together, alone = torch.tensor(answers[0]["parameters"]), train_alone("sgd", "none", EPOCHS)
    moved = (alone - flat(make_model())).norm()
    assert 0 < (together - alone).norm() < 0.1 * moved, "the compression was not used, or lost too much"


def test_flags_are_never_compressed() -> None:
    """Whether anybody has a gradient of a parameter is told by numbers that may be as small as a share of samples."""
    model = make_model()
    buffers = EpochGradients(list(model.parameters()), Uniform8BitQuantization())
    entry = buffers.layout.entries[-1]
    numel = buffers.layout.buffers[entry.buffer].numel
    codec = buffers.codecs.codec_of(entry.buffer, 0, numel)
    chunk = torch.randn(numel) * 100
    chunk[entry.span.slice] = 1e-7
    decoded = codec.decode(codec.encode(chunk), torch.float32, numel)
    assert torch.equal(decoded[entry.span.slice], chunk[entry.span.slice])
    assert not torch.equal(decoded, chunk)


@pytest.mark.parametrize("compression", [Uniform8BitQuantization(), BY_ROLE], ids=["one", "by role"])
def test_state_is_averaged_through_a_compression(pool: Pool, compression: Compression) -> None:
    run = {"optimizer": "sgd", "use_local_updates": True, "delay_state_averaging": False}
    with training(pool, 3, **run, state_codec=compression.spec) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.02)
        ask_all(peers.all, Training.stop, 4)
        histories = [events(peer) for peer in peers.all]
    assert all(event["kind"] == "epoch" for history in histories for event in history), histories
    assert set(by_epoch(histories)) >= {1, 2, 3, 4}


@pytest.mark.long
def test_a_newcomer_with_a_lossy_state_is_alike_after_the_next_round(pool: Pool) -> None:
    """It counts as unlike until the state was averaged: it is not sent to download again, and nobody else is."""
    run = {"optimizer": "adamw", "target": 64, "load_codec": Uniform8BitQuantization().spec}
    with training(pool, 2, **run) as peers:
        old = list(peers.all)
        ask_all(old, Training.train, batch=8, pause=0.05)
        wait_until(lambda: len(events(old[0])) >= 3)
        [newcomer] = peers.add(1, seed=77)
        newcomer.ask(Training.train, batch=8, pause=0.05)
        wait_until(lambda: sum(event["kind"] == "epoch" for event in events(newcomer)) >= 4)
        states = stopped(peers.all, 4)
        histories = [events(peer) for peer in peers.all]
    newest = histories[2]
    downloads = [event for event in newest if event["kind"] == "download"]
    assert 1 <= len(downloads) <= 3, newest
    assert [event["kind"] for event in newest] == ["download"] * len(downloads) + ["epoch"] * (
        len(newest) - len(downloads)
    )
    assert all(event["kind"] == "epoch" for history in histories[:2] for event in history), "a veteran downloaded"
    theirs = {event["epoch"]: event["digest"] for event in histories[0]}
    assert any(event["digest"] != theirs.get(event["epoch"]) for event in downloads), "the download was not lossy"
    steps = newest[len(downloads) :]
    assert all(event["digest"] == theirs[event["epoch"]] for event in steps[1:]), (steps, theirs)
    assert len({state["parameters_digest"] for state in states}) == 1
