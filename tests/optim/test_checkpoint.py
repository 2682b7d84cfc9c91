"""State dicts: a peer that is stopped and started again goes on bit for bit."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, fused, make_model
from tests.optim.processes import Peers, Pool, Trained, Training, events, fixed, training
from tests.soaked import only_in_soak

Alone = Callable[..., shoal.Optimizer]


def train(model: nn.Module, optimizer: shoal.Optimizer, epochs: range) -> None:
    for epoch in epochs:
        backward(model, *fixed_batch(epoch))
        optimizer.step(batch_size=64)
        assert optimizer.local_epoch == epoch + 1


@pytest.mark.long
@pytest.mark.parametrize(("name", "scheduler"), [("adamw", "steps"), ("sgd", "cosine")])
def test_going_on_from_a_file(alone: Alone, name: str, scheduler: str) -> None:
    arguments: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "scheduler": SCHEDULERS[scheduler]}
    model = make_model()
    optimizer = alone(model, target_batch_size=64, **arguments)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(4, 8))
    optimizer.shutdown()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make_model(seed=99)
    restarted = alone(again, target_batch_size=64, run_id=optimizer.run_id, **arguments)
    again.load_state_dict(saved["model"])
    restarted.load_state_dict(saved["optimizer"])
    assert restarted.local_epoch == 4
    assert restarted.tracker.global_epoch == 4
    train(again, restarted, range(4, 8))
    assert torch.equal(flat(again), flat(model))  # the same kernels on copies
    assert restarted.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    mine, theirs = restarted.state_dict()["shoal"], optimizer.state_dict()["shoal"]
    for name in ("lineage", "line"):
        assert mine.pop(name) != theirs.pop(name), "these are rounds of their own"
    assert mine == theirs, "the scheduler differs"


@pytest.mark.long
def test_what_was_given_is_not_changed(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"])
    train(model, optimizer, range(2))
    given = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(given)
    other = make_model()
    second = alone(other, target_batch_size=64, optimizer=OPTIMIZERS["adamw"])
    second.load_state_dict(given)
    train(other, second, range(2, 4))
    assert given.keys() == kept.keys()
    assert given["param_groups"] == kept["param_groups"]
    for key, value in kept["state"].items():
        if isinstance(key, int):
            assert all(torch.equal(given["state"][key][name], tensor) for name, tensor in value.items())
        else:
            assert given["state"][key] == value


def test_state_dicts_are_torchs_too(alone: Alone) -> None:
    model, plain = make_model(), make_model()
    local = OPTIMIZERS["adamw"](plain.parameters())
    for epoch in range(2):
        backward(plain, *fixed_batch(epoch))
        local.step()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"])
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(local.state_dict())
    assert optimizer.local_epoch == 0
    backward(model, *fixed_batch(2))
    optimizer.step(batch_size=64)
    backward(plain, *fixed_batch(2))
    fused(local).step()
    assert torch.equal(flat(model), flat(plain))  # the same fused kernel on tensors of the same shapes

    third = make_model()
    fresh = OPTIMIZERS["adamw"](third.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    mine, theirs = next(third.parameters()), next(plain.parameters())
    assert torch.equal(fresh.state[mine]["exp_avg"], local.state[theirs]["exp_avg"])


@pytest.mark.long
def test_a_state_dict_of_another_model_is_refused(alone: Alone) -> None:
    optimizer = alone(make_model(), target_batch_size=64, optimizer=OPTIMIZERS["adamw"])
    other = OPTIMIZERS["adamw"](nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.local_epoch == 0


@pytest.mark.long
def test_what_another_averager_of_gradients_kept_is_refused(alone: Alone) -> None:
    factory = functools.partial(shoal.PowerSGDGradientAverager, averager_rank=2)
    model = make_model()
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], grad_averager_factory=factory)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for other in (None, shoal.GradientAverager, functools.partial(factory, averager_rank=1)):
        second = alone(make_model(), target_batch_size=64, optimizer=OPTIMIZERS["adamw"], grad_averager_factory=other)
        with pytest.raises(ValueError, match=r"another grad_averager_factory: .*\[\"shoal\"\]\[\"grad_averager\"\]"):
            second.load_state_dict(saved)
        assert second.local_epoch == 0
    without = {**saved, "shoal": {name: value for name, value in saved["shoal"].items() if name != "grad_averager"}}
    second.load_state_dict(without)
    assert second.local_epoch == 2


@pytest.mark.parametrize(
    "option",
    [
        {},
        pytest.param({"offload_optimizer": True}, marks=only_in_soak),
        pytest.param({"delay_grad_averaging": True}, marks=pytest.mark.long),
        pytest.param({"use_local_updates": True}, marks=pytest.mark.long),
        pytest.param({"own_averager": "PowerSGDGradientAverager"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_stopped_and_started_again(pool: Pool, tmp_path: Path, option: dict[str, Any]) -> None:
    """In other processes, from files: it goes on where it was, bit for bit. (Peers keep who they are, too: gradients
    are summed in the order of their keys.)"""
    shares = [(0, 8), (8, 40), (40, 64)]
    keys = [str(tmp_path / f"{index}.key") for index in range(3)]
    run = {"optimizer": "adamw", "scheduler": "steps", "delay_state_averaging": False, "identity": keys, **option}

    def train(peers: Peers, epochs: int) -> list[Trained]:
        return fixed(peers.all, shares, epochs)

    with training(pool, 3, **run) as peers:
        train(peers, 3)
        for index, peer in enumerate(peers.all):
            peer.ask(Training.save, str(tmp_path / f"{index}.pt"))
        expected = train(peers, 6)
    with training(pool, 3, seed=9, **run) as peers:
        for index, peer in enumerate(peers.all):
            assert peer.ask(Training.load, str(tmp_path / f"{index}.pt")) == 3
        assert train(peers, 6) == expected
        histories = [events(peer) for peer in peers.all]
    assert all(event["kind"] == "epoch" for history in histories for event in history)
