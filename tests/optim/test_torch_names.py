"""Private names of torch stand in one file of the room, so that a new version of torch is checked in one place."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import shoal.optim
from shoal.optim import _torch

PRIVATE = re.compile(
    r"torch\._[a-z]\w*|from torch[\w.]* import .*\b_[a-z]\w*|"
    r"\._(?:version|opt_called|step_count|step_supports_amp_scaling|per_optimizer_states|check_inf_per_device)\b"
)
"""Attributes of modules of torch, what is imported from them, and those of its objects that this room knows."""


def test_only_one_file_reaches_for_them() -> None:
    found = {
        path.name: PRIVATE.findall(path.read_text())
        for path in Path(shoal.optim.__file__).parent.glob("*.py")
        if PRIVATE.search(path.read_text())
    }
    assert set(found) == {"_torch.py"}, found


def test_each_is_there() -> None:
    parameter = torch.zeros(2)
    before = _torch.writes_of(parameter)
    _torch.foreach_copy_([parameter], [torch.ones(2)])
    assert _torch.writes_of(parameter) > before
