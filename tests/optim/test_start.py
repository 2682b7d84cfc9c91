"""What it costs to make an Optimizer, and what is left of it: no process, few threads, little memory, no time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.forked import ROOT

pytestmark = pytest.mark.timed

COMMAND = [sys.executable, "-m", "tests.optim.starting"]


def test_making_one_is_cheap_and_a_kill_leaves_nothing() -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            measured: dict[str, Any] = json.loads(process.stdout.readline())
        finally:
            process.kill()
    print(measured)
    assert measured["epoch"] == 1
    assert measured["cpu"] < 1.2, "CPU time from import to a constructed Optimizer, in that of importing torch"
    assert measured["memory"] < 60, "MB more than torch alone"
    assert measured["threads"] <= 6
    assert measured["python_threads"] == ["shoal-reactor"]
    assert measured["children"] == []
    _, _, host, _, port, *_ = measured["address"].split("/")
    with socket.socket() as client:
        client.settimeout(5)
        assert client.connect_ex((host, int(port))) != 0, "somebody still listens"


@pytest.mark.long
def test_nothing_runs_after_shutdown() -> None:
    done = subprocess.run([*COMMAND, "--stop"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["left"] == {"threads": 0, "python_threads": []}
    assert not done.stderr
