"""The recipe's example, as the guide has it, plain and in TorchScript: QHM, on three processes."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed import rpc

from shoal import DistributedOptimizer
from tests.forked import ROOT
from tests.remote.process import NAMES
from tests.remote.tables import assert_close, local_params, local_step, make_tables, params, step, values

OPTIONS = {"lr": 0.1, "momentum": 0.9, "nu": 0.7, "weight_decay": 0.01}


class MyQHM(torch.optim.Optimizer):
    """What `FunctionalQHM` is registered for."""


def find_modules_in(folder: str) -> None:
    sys.path.insert(0, folder)


def runs_as_written(folder: str, module: str) -> None:
    from shoal import QHM

    for name in NAMES:
        rpc.rpc_sync(name, find_modules_in, (folder,))
    DistributedOptimizer.functional_optim_map[MyQHM] = import_module(module).FunctionalQHM
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    optimizer = DistributedOptimizer(MyQHM, rrefs, **OPTIONS)
    local = QHM(ours, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for used in ((0, 1, 2), (0, 2), (0, 1, 2)):
        step(optimizer, tables, used=used)
        local_step(local, ours, used=used)
    assert_close(values(rrefs), ours)
    state = optimizer.state_dict()
    assert set(state["state"]) == set(range(6))
    torch.testing.assert_close(
        [entry["momentum_buffer"] for entry in state["state"].values()],
        [local.state[each]["momentum_buffer"] for each in ours],
    )
    for _ in range(2):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    local.param_groups[0]["lr"] = 0.05
    fresh = DistributedOptimizer(MyQHM, rrefs, **OPTIONS)
    fresh.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        step(fresh, tables)
        local_step(local, ours)
    assert_close(values(rrefs), ours)


@pytest.mark.parametrize("form", ["plain", "scripted"])
def test_the_recipe_runs_as_the_guide_has_it(trainer, form, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "remote.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "class FunctionalQHM" in block
    )
    if form == "scripted":
        code = code.replace("class FunctionalQHM", "@torch.jit.script\nclass FunctionalQHM")
    module = f"recipe_{form}"
    (tmp_path / f"{module}.py").write_text(f"import torch\n{code}")
    trainer(runs_as_written, str(tmp_path), module)
