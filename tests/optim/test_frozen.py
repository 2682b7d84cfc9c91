"""Frozen parameters, such as a base model under adapters: each peer has its own, and nobody downloads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.frozen import described_frozen
from shoal.optim.kept import Keeper
from shoal.optim.reports import DownloadReport
from shoal.swarm import contacts
from shoal.swarm.protocol.errors import AveragingError

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in place": {"reuse_grad_buffers": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo(inner_steps=2)},
    "outer, delayed": {"outer": shoal.DiLoCo(inner_steps=2, overlap=1)},
}


class Adapted(nn.Module):
    """A base of 64 x 64, frozen, and an adapter of rank 1."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(64, 1, bias=False), nn.Linear(1, 64, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacts, "ALONE_SECONDS", 0.0)


@pytest.fixture
def first() -> Iterator[shoal.DHT]:
    with shoal.DHT(start=True) as dht:
        yield dht


def make(dht: shoal.DHT, model: nn.Module, **given: Any) -> shoal.Optimizer:
    target = {} if "outer" in given else {"target_batch_size": 8}
    return shoal.Optimizer(
        dht=dht, run_id="adapters", params=model.named_parameters(), batch_size_per_step=4, matchmaking_time=1.0,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2), **target, **given,
    )  # fmt: skip


def train(model: nn.Module, optimizer: shoal.Optimizer, epochs: int) -> None:
    goal = optimizer.local_epoch + epochs
    while optimizer.local_epoch < goal:
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("mode", MODES)
def test_a_newcomer_downloads_what_is_trained(first: shoal.DHT, mode: str) -> None:
    model, other = Adapted(), Adapted()
    storage = model.base.weight.untyped_storage().data_ptr()
    one = make(first, model, **MODES[mode])
    train(model, one, 2)
    one.settle()
    assert model.base.weight.untyped_storage().data_ptr() == storage, "the base was copied"
    assert [len(group["params"]) for group in one.param_groups] == [4]
    events: list[Any] = []
    with shoal.DHT(list(map(str, first.get_visible_maddrs())), start=True) as second:
        two = make(second, other, **MODES[mode])
        two.on_event = events.append
        two.step(batch_size=0)
        [download] = [event for event in events if isinstance(event, DownloadReport)]
        assert download.bytes < 4 * 3 * 2 * 64 + 4096
        assert all(map(torch.equal, one_of(one), one_of(two)))
        two.shutdown()
    one.shutdown()
    assert torch.equal(model.base.weight, Adapted().base.weight)


def one_of(optimizer: shoal.Optimizer) -> list[torch.Tensor]:
    """The tensors that peers share: the parameters, or their anchors."""
    stepped = optimizer.outer_optimizer or optimizer.optimizer
    parameters = [parameter for group in stepped.param_groups for parameter in group["params"]]
    return [parameter.detach() for parameter in parameters if parameter.requires_grad]


def test_another_base_is_refused_by_name(first: shoal.DHT) -> None:
    model, other = Adapted(), Adapted()
    one = make(first, model)
    train(model, one, 1)  # of two peers without a run, either may be refused
    other.base.weight.data[0, 0] += 1
    words = r"option frozen_parameters\)\[0\] \(base\.weight\) is float32\[64, 64\] of hash"
    with shoal.DHT(list(map(str, first.get_visible_maddrs())), start=True) as second:
        with pytest.raises(AveragingError, match=words):
            make(second, other).step(batch_size=0)
        with pytest.raises(AveragingError, match="frozen_parameters is own here, and nothing there"):
            make(second, Adapted(), frozen_parameters="own").step(batch_size=0)
        with pytest.raises(AveragingError, match="the number of parameters is 4 here, and 2 there"):
            make(second, Adapted().requires_grad_()).step(batch_size=0)
        make(second, Adapted()).shutdown()
    one.shutdown()


def test_a_base_that_is_nobodys_business(first: shoal.DHT) -> None:
    one, model = make(first, Adapted(), frozen_parameters="own"), Adapted(seed=1)
    with shoal.DHT(list(map(str, first.get_visible_maddrs())), start=True) as second:
        make(second, model, frozen_parameters="own").shutdown()
    one.shutdown()
    assert torch.equal(model.base.weight, Adapted(seed=1).base.weight)


@pytest.mark.parametrize("mode", ["synchronous", "delayed", "outer"])
def test_a_random_base_may_be_sent(first: shoal.DHT, mode: str) -> None:
    model, other = Adapted(), Adapted(seed=1)
    one = make(first, model, frozen_parameters="send", **MODES[mode])
    train(model, one, 2)
    one.settle()
    with shoal.DHT(list(map(str, first.get_visible_maddrs())), start=True) as second:
        two = make(second, other, frozen_parameters="send", **MODES[mode])
        two.step(batch_size=0)
        assert torch.equal(model.base.weight, other.base.weight)
        two.shutdown()
    one.shutdown()


@pytest.mark.parametrize("mode", ["synchronous", "outer"])
def test_a_state_that_an_older_release_kept_is_loaded(first: shoal.DHT, tmp_path: Path, mode: str) -> None:
    """It has the frozen parameters in it, as with `frozen_parameters="send"`."""
    model, fresh = Adapted(), Adapted()
    older = make(first, model, frozen_parameters="send", **MODES[mode])
    train(model, older, 2)
    Keeper(tmp_path, b"").keep(older._state.exact_copy())
    [path] = tmp_path.iterdir()
    shared = [tensor.clone() for tensor in one_of(older)]
    older.shutdown()
    now = make(first, fresh, **MODES[mode])
    now.load_kept_state(path)
    assert now.local_epoch == 2
    assert all(map(torch.equal, shared, one_of(now)))
    now.shutdown()


def test_checkpoints_have_the_form_that_they_had(first: shoal.DHT) -> None:
    model = Adapted()
    one = make(first, model, frozen_parameters="send")
    train(model, one, 1)
    saved = one.state_dict()
    one.shutdown()
    now = make(first, model)
    now.load_state_dict(saved)
    assert now.local_epoch == 1
    train(model, now, 1)
    assert [len(group["params"]) for group in now.state_dict()["param_groups"]] == [4]
    now.shutdown()


def test_samples_tell_copies_apart_and_leave_quantized_ones_out() -> None:
    base = torch.randn(300, 300)
    tensors = [base, base.to(torch.int8), base.bfloat16()]
    found = described_frozen(tensors, ["a", "b", "c"], whole=False)
    assert list(found.names) == ["a", "c"]
    assert found.shapes == described_frozen(tensors, ["a", "b", "c"], whole=False).shapes
    assert described_frozen([base * 1.001], [], whole=False).shapes[0] != found.shapes[0]
    changed = base.clone()
    changed[150, 150:158] += 1
    for whole in (True, False):
        same = described_frozen([base], [], whole=whole).shapes == described_frozen([changed], [], whole=whole).shapes
        assert same != whole, "a sample misses a small change, and a hash does not"
