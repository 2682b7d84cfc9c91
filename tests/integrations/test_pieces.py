"""A framework's optimizer, of whose parameters it steps pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cluster.strands import Strands
from shoal.integrations.accelerate import swarm
from shoal.integrations.pieces import PiecesOfRanks
from tests.integrations.tiny import inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks

EPOCHS = 4


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Which keeps a sum for each element before its first step; here not all are alike."""
    made = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        made.state[parameter]["sum"] = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
    return made


def named_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with options of their own, whose parameters have names."""
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.05}], lr=0.01)


class Network(nn.Module):
    """One of whose parameters has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layers(rows) * self.scale
        return out


def losses_of(model: nn.Module) -> Tensor:
    rows = inputs(16)
    loss: Tensor = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    return loss


@pytest.mark.long
@pytest.mark.parametrize("make", [adagrad, named_groups])
def test_it_trains_as_it_would_alone(dht: shoal.DHT, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    expected = Network()
    plain = make(expected)
    schedule = ExponentialLR(plain, gamma=0.5)
    for _ in range(EPOCHS):
        plain.zero_grad()
        losses_of(expected).backward()
        plain.step()
        schedule.step()

    model = Network()
    optimizer: Any = make(model)
    before = [list(group["params"]) for group in optimizer.param_groups]
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    data = DataLoader(TensorDataset(inputs(16)), batch_size=16)
    run: dict[str, Any] = {"dht": dht, "run_id": f"pieces of {make.__name__}", "target_batch_size": 16}
    accelerator: Any = Accelerator(cpu=True)
    wrapped, stepped, data, following = swarm(
        accelerator,
        model,
        optimizer,
        data,
        ExponentialLR(optimizer, gamma=0.5),
        cluster=shoal.Cluster(strands=3),
        **run,
    )
    assert [list(group["params"]) for group in stepped.param_groups] == before
    for _ in range(EPOCHS):
        for (batch,) in data:
            accelerator.backward((wrapped(batch) - batch.sum(1, keepdim=True)).square().mean())
            stepped.step()
            following.step()
            stepped.zero_grad()
    accelerator.end_training()
    assert len(steps) == EPOCHS
    assert following.get_last_lr() == schedule.get_last_lr() == [group["lr"] for group in stepped.param_groups]
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_it_keeps_is_cut_as_its_parameters_are() -> None:
    model, cluster = Network(), shoal.Cluster(strands=3)
    optimizer = adagrad(model)
    pieces = PiecesOfRanks(optimizer, cluster)
    strands = Strands(cluster, pieces.params)
    assert pieces.make(strands.params) is optimizer
    kept = [optimizer.state[piece] for piece in optimizer.param_groups[0]["params"]]
    assert [each["step"].tolist() for each in kept] == [0.0] * len(strands.pieces)
    for number, parameter in enumerate(model.parameters()):
        parts = [kept[places[number]]["sum"] for places in strands.numbers]
        assert torch.cat(parts).tolist() == list(range(1, parameter.numel() + 1))


class Odd(torch.optim.SGD):
    """A class of the user's own, of which nobody knows whether it treats elements alike."""


def test_an_optimizer_that_is_refused_has_its_parameters(dht: shoal.DHT) -> None:
    model = Network()
    optimizer = Odd(model.parameters(), lr=0.1)
    run: dict[str, Any] = {"dht": dht, "run_id": "refused", "target_batch_size": 16}
    with pytest.raises(ValueError, match=r"it is not known of Odd that it treats each element alike: give shoal.Clus"):
        swarm(Accelerator(cpu=True), model, optimizer, cluster=shoal.Cluster(strands=3), **run)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
