"""The demo for real, made short: peers that train together over sockets. ``make demo`` is the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("compression", ["none", "float16"])
def test_two_peers_stay_identical_and_learn(tmp_path: Path, compression: str) -> None:
    options = ("--peers", "2", "--epochs", "12", "--no-kill", "--compression", compression, "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "demo", *options], capture_output=True, text=True, timeout=110, check=False
    )
    report = json.loads((tmp_path / "report.json").read_text())
    # Twelve epochs are too few to beat a bigram model, and may be over before the newcomer has imported torch.
    serious = [problem for problem in report["problems"] if "bigram" not in problem and "newcomer" not in problem]
    assert serious == [], done.stdout
    assert done.returncode == 1
    assert report["digests_equal"]
    assert report["epochs_compared"] >= 12
    assert report["loss_after"] < report["loss_before"] - 1
