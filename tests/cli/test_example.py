"""``examples/train.py``, alone and with another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.long]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
COMMAND = [sys.executable, str(SCRIPT), "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--epochs"]


def test_alone() -> None:
    done = subprocess.run([*COMMAND, "3"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 2: loss" in done.stdout


def test_a_second_peer_joins_by_the_address_that_the_first_prints() -> None:
    first = subprocess.Popen([*COMMAND, "6"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        address = first.stdout.readline().split()[-1]
        second = [*COMMAND, "6", "--initial-peers", address, "--batch-size", "8"]
        done = subprocess.run(second, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert first.wait(timeout=200) == 0
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
