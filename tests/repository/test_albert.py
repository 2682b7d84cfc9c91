"""The ALBERT example, small: two peers train one model and a monitor sees both; a checkpoint is gone on from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AlbertForMaskedLM

from tests.peers import ROOT

SMALL = ["--vocabulary", "400", "--length", "32", "--batch-size", "8", "--target-batch-size", "64"]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "examples.albert", "--data", str(ROOT / "docs"), *SMALL, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_two_peers_train_and_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    checkpoint, export = tmp_path / "albert.pt", tmp_path / "albert"
    printed = run("--epochs", "12", "--checkpoint", str(checkpoint), "--export", str(export))
    losses = [float(loss) for loss in re.findall(r"peer 1 +epoch \d+: loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert re.search(r"peer 2 +epoch 12", printed)
    assert re.search(r"monitor +epoch \d+: 2 peers", printed)
    saved = torch.load(checkpoint, weights_only=True)
    exported = AlbertForMaskedLM.from_pretrained(export).state_dict()
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in exported.items())

    printed = run("--epochs", "14", "--checkpoint", str(checkpoint))
    assert "goes on from epoch 12" in printed
    assert re.search(r"peer 1 +epoch 14", printed)
