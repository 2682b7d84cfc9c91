"""The ALBERT example, small: two peers train one model and a monitor sees both; a checkpoint is gone on from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AlbertForMaskedLM

from tests.forked import ROOT

SMALL = ["--vocabulary", "400", "--length", "32", "--batch-size", "8", "--target-batch-size", "64"]
FAST = ["--warm-up", "2", "--lr", "0.03"]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, "--data", str(ROOT / "docs"), *SMALL, *FAST, *arguments]
    # On an idle machine it takes seconds; on a busy one four imports of transformers take minutes.
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it goes on and on: {error.stdout!r}\n{error.stderr!r}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(420)
def test_two_peers_train_and_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    checkpoint, export = tmp_path / "albert.pt", tmp_path / "albert"
    printed = run("examples.albert", "--epochs", "10", "--checkpoint", str(checkpoint), "--export", str(export))
    # Of both peers, and of some epochs: on a busy machine one peer may make a single step in an epoch.
    losses = [float(loss) for loss in re.findall(r"peer [12] +epoch \d+: loss ([\d.]+)", printed)]
    assert mean(losses[-6:]) < mean(losses[:4]) - 0.1, printed
    assert re.search(r"peer 2 +epoch 10", printed), printed
    assert re.search(r"monitor +epoch \d+: 2 peers", printed), printed
    saved = torch.load(checkpoint, weights_only=True)
    exported = AlbertForMaskedLM.from_pretrained(export).state_dict()
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in exported.items())

    printed = run("examples.albert.trainer", "--epochs", "11", "--checkpoint", str(checkpoint))
    assert "goes on from epoch 10" in printed
    assert re.search(r"^epoch 11", printed, re.MULTILINE), printed
