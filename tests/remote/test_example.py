"""The example, small: with one trainer it is a single process's training, with two it learns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forked import ROOT


@pytest.mark.long
@pytest.mark.timeout(240)  # so that what waits for ever ends by the example's own patience, and says what it was
@pytest.mark.parametrize("options", [["--trainers", "1", "--check"], ["--trainers", "2"]], ids=["one", "two"])
def test_the_example_learns(options) -> None:
    command = [sys.executable, str(ROOT / "examples" / "parameter_server.py"), "--steps", "60", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held out" in done.stdout
