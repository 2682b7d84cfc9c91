"""A state dict that an older torch has saved loads in every mode, and training goes on with torch's numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed import checkpoint as dcp

import shoal
from tests.old_checkpoints import CLASSES, FORMS, SHAPES, assert_close, go_on, old_checkpoint, torchs
from tests.optim.conftest import Alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "on the host": {"offload_optimizer": True},
    "local updates": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo(), "target_batch_size": 1000},
    "strands": {"cluster": shoal.Cluster(strands=4)},
    "strands with outer": {"cluster": shoal.Cluster(strands=4), "outer": shoal.DiLoCo(), "target_batch_size": 1000},
}
CASES = [(mode, kind, "number") for mode in ("default", "strands") for kind in CLASSES]
CASES += [(mode, kind, form) for mode in MODES for kind in (optim.NAdam, optim.ASGD) for form in FORMS]


def made(alone: Alone, kind: type[optim.Optimizer], params: list[nn.Parameter], mode: str) -> shoal.Optimizer:
    given = {"params": params, "optimizer": lambda params: kind(params, **CLASSES[kind]), **MODES[mode]}
    return alone(nn.Module(), **{"target_batch_size": 4, "batch_size_per_step": 4, **given})


@pytest.mark.parametrize(("mode", "kind", "form"), dict.fromkeys(CASES))
def test_it_goes_on_as_torch_does(alone: Alone, mode: str, kind: type[optim.Optimizer], form: str) -> None:
    values, state = old_checkpoint(kind, form)
    before = copy.deepcopy(state)
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = made(alone, kind, params, mode)
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())  # and so does its own state
    go_on(params, optimizer.step)
    assert_close(params, torchs(kind, values, state))
    assert repr(state) == repr(before), "what was given has changed"


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_strands_has_the_numbers_as_torch_keeps_them(alone: Alone, tmp_path: Path, form: str) -> None:
    """So a new optimizer finds room for them. A parameter of one element has state of their shape."""
    values, state = old_checkpoint(optim.NAdam, form)
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = made(alone, optim.NAdam, params, "strands")
    optimizer.load_state_dict(state)
    dcp.save({"optimizer": optimizer.strand_state()}, checkpoint_id=tmp_path)
    optimizer.shutdown()
    others = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    other = made(alone, optim.NAdam, others, "strands")
    dcp.load({"optimizer": other.strand_state()}, checkpoint_id=tmp_path)
    for held in other.state_dict()["state"].values():
        if isinstance(held, dict):
            assert (held["step"].shape, held["step"].item()) == ((), 5.0)
    for param, value in zip(others, values, strict=True):
        param.data.copy_(value)
    go_on(others, other.step)
    assert_close(others, torchs(optim.NAdam, values, state))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_tensor_of_another_shape_is_refused_by_strands(alone: Alone, name: str) -> None:
    _, state = old_checkpoint(optim.Adam, "number")
    optimizer = made(alone, optim.Adam, [nn.Parameter(torch.zeros(shape)) for shape in SHAPES], "strands")
    state["state"][0][name] = torch.ones(1)
    with pytest.raises(ValueError, match=rf"has a {name} of shape \(1,\) for parameter 0"):
        optimizer.load_state_dict(state)
