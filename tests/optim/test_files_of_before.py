"""States that commit d4e6cae has written, before states were trees, are loaded: `files_of_before/` has a checkpoint and
a kept state of four epochs, in two modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from tests.optim.conftest import Alone

FILES = Path(__file__).parent / "files_of_before"
MODES: dict[str, dict[str, Any]] = {
    "adamw": {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    },
    "diloco": {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.1), "outer": shoal.DiLoCo()},
}


def made(alone: Alone, mode: str) -> tuple[torch.nn.Module, shoal.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    given = {"target_batch_size": 8, "batch_size_per_step": 8, "extra_tensors": [torch.zeros(3)], **MODES[mode]}
    return model, alone(model, run_id="old", **given)


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
