"""States that commit d4e6cae has written, before states were trees, are loaded: `files_of_before/` has a checkpoint and
a kept state of four epochs, in two modes, and the same of strands: a state dict and a checkpoint of
torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import shoal
from tests.optim.conftest import Alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

FILES = Path(__file__).parent / "files_of_before"
MODES: dict[str, dict[str, Any]] = {
    "adamw": {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    },
    "diloco": {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.1), "outer": shoal.DiLoCo()},
}
STRANDS = {"cluster": shoal.Cluster(strands=2)}


def made(alone: Alone, mode: str, **given: Any) -> tuple[torch.nn.Module, shoal.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    usual = {"target_batch_size": 8, "batch_size_per_step": 8, "extra_tensors": [torch.zeros(3)], **MODES[mode]}
    return model, alone(model, run_id="old", **usual, **given)


def check_state(optimizer: shoal.Optimizer, model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """The optimizer's state is the saved one, and so is the anchor."""
    assert optimizer.local_epoch == 4
    own = optimizer.state_dict()
    pairs = [(own, saved)]
    if "outer" in saved["shoal"]:
        pairs.append((own["shoal"]["outer"], saved["shoal"]["outer"]))
        for anchor, before in zip(own["shoal"]["drift"]["anchor"], saved["shoal"]["drift"]["anchor"], strict=True):
            assert torch.equal(anchor, before)
    for now, then in pairs:
        for number, _ in enumerate(model.parameters()):
            assert now["state"][number].keys() == then["state"][number].keys()
            for name, value in then["state"][number].items():
                assert torch.equal(now["state"][number][name], value), (number, name)
    assert [group["lr"] for group in own["param_groups"]] == [group["lr"] for group in saved["param_groups"]]


def then_steps(model: torch.nn.Module, optimizer: shoal.Optimizer) -> None:
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.local_epoch == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint(alone: Alone, mode: str) -> None:
    model, optimizer = made(alone, mode)
    saved = torch.load(FILES / f"{mode}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.local_epoch == 4
    own = optimizer.state_dict()["state"]
    for number, parameter in enumerate(model.parameters()):
        for name, value in saved["optimizer"]["state"][number].items():
            assert torch.equal(own[number][name], value), (number, name, parameter.shape)
    then_steps(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_state(alone: Alone, mode: str) -> None:
    model, optimizer = made(alone, mode)
    optimizer.load_kept_state(FILES / f"{mode}.kept.pt")
    assert optimizer.local_epoch == 4
    if mode == "adamw":
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
        saved = torch.load(FILES / "adamw.pt", weights_only=True)
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved["model"][name])
        for number, values in optimizer.state_dict()["state"].items():
            if number != "local_epoch":
                for name, value in values.items():
                    assert torch.equal(value, saved["optimizer"]["state"][number][name])
    then_steps(model, optimizer)


@pytest.mark.parametrize("given", [STRANDS, {}], ids=["strands", "whole"])
@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_of_strands(alone: Alone, mode: str, given: dict[str, Any]) -> None:
    model, optimizer = made(alone, mode, **given)
    saved = torch.load(FILES / f"strands.{mode}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    check_state(optimizer, model, saved["optimizer"])
    then_steps(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_state_dict_of_a_process_into_strands(alone: Alone, mode: str) -> None:
    model, optimizer = made(alone, mode, **STRANDS)
    saved = torch.load(FILES / f"{mode}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    check_state(optimizer, model, saved["optimizer"])
    then_steps(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_of_each_strand(alone: Alone, mode: str) -> None:
    model, optimizer = made(alone, mode, **STRANDS)
    extras = optimizer._state.extra_tensors
    state = {"model": model.state_dict(), "optimizer": optimizer.strand_state()}
    dcp.load(state, checkpoint_id=FILES / f"strands.{mode}")
    saved = torch.load(FILES / f"strands.{mode}.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["model"][name])
    check_state(optimizer, model, saved["optimizer"])
    assert extras[0].tolist() == [0.0, 1.0, 2.0]
    then_steps(model, optimizer)
