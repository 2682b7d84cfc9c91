"""Half a minute of chaos passes, and fails where a trainer breaks a promise. `make soak` runs the second test, and half
an hour of chaos."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.soak.chaos import soak

pytestmark = [pytest.mark.timed, pytest.mark.long]


def test_trainers_that_are_killed_stopped_and_started(tmp_path: Path) -> None:
    report, line = soak(30.0, 1, tmp_path, calm=8.0, beat=4.0)
    # A blow every 4 s costs more epochs than the promise, of one every 10 s, allows.
    assert [text for text in report.broken if "of its epochs" not in text] == []
    assert line["blows"]["killed"]
    assert line["blows"]["stopped"]
    assert report.compared > 5
    assert json.loads(json.dumps(line)) == line | {"slept_in": list(report.slept_in)}


@pytest.mark.skipif("SHOAL_SOAK" not in os.environ, reason="one and a half minutes: set SHOAL_SOAK, or make soak")
@pytest.mark.parametrize(("fault", "says"), [("digest", "differ: "), ("quit", "trainer-0 ended by itself")])
def test_a_promise_that_is_broken_is_seen(fault: str, says: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.soak.chaos",
        "--minutes",
        "0.5",
        "--seed",
        "1",
        "--cuts",
        "0",
        "--fault",
        fault,
    ]
    ended = subprocess.run(
        [*command, "--logs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    assert "| BROKEN | " in ended.stdout
    assert says in ended.stdout
    assert json.loads(ended.stdout.splitlines()[-1])["broken"]
