"""`strand_state` of a process that is alone: what a checkpoint has, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shoal
from shoal.optim.group_options import KERNELS
from tests.optim.conftest import Alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


class Net(nn.Module):
    """A layer that no backward pass reaches, and one that is not trained."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = nn.Linear(2, width), nn.Linear(2, 1)
        self.last = nn.Linear(width, 1).requires_grad_(False)
        self.extra = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def made(alone: Alone, model: Net, **given: Any) -> shoal.Optimizer:
    others = [*model.unused.parameters(), *model.last.parameters()]
    usual: dict[str, Any] = {
        "params": [{"params": list(model.first.parameters())}, {"params": others, "lr": 0.5}],
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "extra_tensors": [model.extra],
        "cluster": shoal.Cluster(strands=4),
        "target_batch_size": 4,
        "batch_size_per_step": 4,
        "run_id": "r",
    }  # fmt: skip
    return alone(model, **{**usual, **given})


def train(model: Net, optimizer: shoal.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 2), 1.0 + step)).square().mean().backward()
        optimizer.step()


def values(model: Net) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def save(optimizer: shoal.Optimizer, model: Net, path: Path) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.strand_state()}, checkpoint_id=path)


def load(optimizer: shoal.Optimizer, model: Net, path: Path) -> None:
    dcp.load({"model": model.state_dict(), "optimizer": optimizer.strand_state()}, checkpoint_id=path)


def everything(optimizer: shoal.Optimizer) -> Any:
    """The whole state, without the kernels that this machine has chosen."""
    return plain(optimizer.state_dict())


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in KERNELS}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 3])
def test_all_of_the_state_comes_back(alone: Alone, tmp_path: Path, steps: int) -> None:
    first, second = Net(), Net()
    optimizer = made(alone, first)
    train(first, optimizer, steps)
    first.extra.fill_(7.0)
    save(optimizer, first, tmp_path)
    optimizer.shutdown()
    other = made(alone, second)
    train(second, other, 1)
    load(other, second, tmp_path)
    assert everything(other) == everything(optimizer)
    assert (values(second), other.tip, second.extra.tolist()) == (values(first), optimizer.tip, [7.0, 7.0])
    assert [group["lr"] for group in other.param_groups] == [0.1 * 0.5**steps, 0.5 * 0.5**steps]
    train(second, other, 1)
    assert other.local_epoch == steps + 1


@pytest.mark.long
@pytest.mark.parametrize("outer", [shoal.DiLoCo(inner_steps=4), shoal.DiLoCo(inner_steps=4, fragments=2)])
def test_a_drift_comes_back(alone: Alone, tmp_path: Path, outer: shoal.DiLoCo) -> None:
    """In the middle of an epoch, with inner steps that no round has taken."""
    first, second = Net(), Net()
    given: dict[str, Any] = {"target_batch_size": None, "outer": outer}
    optimizer = made(alone, first, **given)
    train(first, optimizer, 6)
    save(optimizer, first, tmp_path)
    before = everything(optimizer), values(first), optimizer.local_epoch
    train(first, optimizer, 3)
    optimizer.shutdown()
    other = made(alone, second, **given)
    load(other, second, tmp_path)
    assert (everything(other), values(second), other.local_epoch) == before
    train(second, other, 3)
    mine, theirs = everything(other), everything(optimizer)
    for name in ("lineage", "line"):
        assert mine["shoal"].pop(name) != theirs["shoal"].pop(name), "these are rounds of their own"
    assert (mine, values(second)) == (theirs, values(first))


@pytest.mark.long
def test_what_does_not_fit_is_refused_and_changes_nothing(alone: Alone, tmp_path: Path) -> None:
    optimizer = made(alone, Net())
    state = optimizer.strand_state().state_dict()
    optimizer.shutdown()

    differing: dict[str, tuple[Net, dict[str, Any]]] = {
        "not cut into 2 strands": (Net(), {"cluster": shoal.Cluster(strands=2)}),
        "of other parameters": (Net(width=5), {}),
        "a scheduler": (Net(), {"scheduler": None}),
        "scheduler has no": (
            Net(),
            {"scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)},
        ),
        "outer=": (Net(), {"outer": shoal.DiLoCo(), "scheduler": None}),
        "keeps exp_avg": (Net(), {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}),
        "strand 2 is not in the state": (Net(), {}),
        "last_epoch is 'late'": (Net(), {}),
        "extra tensor 0 is not in the state": (Net(), {}),
        "strand 2 has 'exp_avg' of another shape": (Net(), {}),
    }
    trained = made(alone, model := Net())
    train(model, trained, 1)
    common = trained.strand_state().state_dict()
    trained.shutdown()
    for said, (net, given) in differing.items():
        other = made(alone, net, **given)
        train(net, other, 1)
        own = other.strand_state().state_dict()
        own = {**state, **{name: value for name, value in own.items() if name.startswith("strand ")}}
        if said == "keeps exp_avg":
            own |= {name: value for name, value in common.items() if name.startswith("cut")}
        elif said.startswith("strand 2 is"):
            del own["strand 2"]
        elif said.startswith("strand 2 has"):
            own |= {name: value for name, value in common.items() if name.startswith("cut")}
            own["strand 2"]["statistics"]["exp_avg"]["0"] = torch.zeros(99)
        elif said.startswith("extra"):
            own["extra tensors"] = {"0": torch.zeros(3)}
        elif said.startswith("last_epoch"):
            key = next(name for name in own if name.startswith("cut"))
            shared = msgspec.msgpack.decode(own[key])
            own[key] = msgspec.msgpack.encode(shared | {"scheduler": {"last_epoch": "late"}})
        before = everything(other), values(net), other.tip
        with pytest.raises(ValueError, match=said):
            other.strand_state().load_state_dict(own)
        assert (everything(other), values(net), other.tip) == before
        train(net, other, 1)
        assert other.local_epoch == 2
        other.shutdown()


@pytest.mark.long
def test_torch_names_the_number_of_strands(alone: Alone, tmp_path: Path) -> None:
    first, second = Net(), Net()
    save(made(alone, first), first, tmp_path)
    other = made(alone, second, run_id="s", cluster=shoal.Cluster(strands=8))
    train(second, other, 1)
    before = everything(other), values(second), other.tip
    with pytest.raises(CheckpointException, match="cut into 8 strands"):
        load(other, second, tmp_path)
    assert (everything(other), values(second), other.tip) == before


def test_without_strands_it_names_the_way_out(alone: Alone) -> None:
    with pytest.raises(ValueError, match=r"cluster=shoal\.Cluster\(strands=8\)"):
        made(alone, Net(), cluster=None).strand_state()


class Stubborn(torch.optim.SGD):
    """No other one can be made from what it tells."""

    element_wise = True

    def __init__(self, params: Iterable[Any], secret: object) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)


def test_an_optimizer_of_which_no_other_can_be_made_is_saved_after_a_step(alone: Alone, tmp_path: Path) -> None:
    model = Net()
    model.unused.requires_grad_(False)
    optimizer = made(alone, model, optimizer=lambda params: Stubborn(params, object()))
    with pytest.raises(ValueError, match=r"no other Stubborn can be made .* make a step before"):
        optimizer.strand_state().state_dict()
    train(model, optimizer, 1)
    save(optimizer, model, tmp_path)
    before = everything(optimizer)
    train(model, optimizer, 1)
    load(optimizer, model, tmp_path)
    assert everything(optimizer) == before


@pytest.mark.long
@pytest.mark.parametrize("outer", [None, shoal.DiLoCo(inner_steps=2)])
def test_what_is_loaded_stays_the_callers(alone: Alone, outer: shoal.DiLoCo | None) -> None:
    """No step changes it."""
    given: dict[str, Any] = {} if outer is None else {"target_batch_size": None, "outer": outer}
    first = Net()
    optimizer = made(alone, first, **given)
    train(first, optimizer, 3)
    whole, strands = optimizer.state_dict(), optimizer.strand_state().state_dict()
    before = plain(whole), plain(strands)
    optimizer.shutdown()
    for load in (
        lambda other: other.load_state_dict(whole),
        lambda other: other.strand_state().load_state_dict(strands),
    ):
        other = made(alone, model := Net(), **given)
        load(other)
        train(model, other, 3)
        other.shutdown()
        assert (plain(whole), plain(strands)) == before


def test_without_an_anchor_the_outer_optimizer_begins_anew(alone: Alone) -> None:
    """As in a process alone: the model that was loaded is the anchor."""
    given: dict[str, Any] = {"target_batch_size": None, "outer": shoal.DiLoCo(inner_steps=2), "scheduler": None}
    optimizer = made(alone, model := Net(), **given)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()["shoal"]
    assert saved["outer"]["state"]
    assert saved["drift"]["steps"] == 1
    inner = optimizer.optimizer.state_dict()
    optimizer.load_state_dict(inner)
    found = optimizer.state_dict()["shoal"]
    assert not found["outer"]["state"]
    assert (found["drift"]["steps"], found["drift"]["samples"]) == (0, 0.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(torch.equal(*each) for each in zip(found["drift"]["anchor"], trained, strict=True))
