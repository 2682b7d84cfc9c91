"""The guard of tests/left_behind.py fails a run that leaves a process or a port behind, and only such a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUARD = Path(__file__).parents[1] / "left_behind.py"

CLEAN = """
import socket, subprocess, sys
def test_cleans_up():
    with socket.create_server(("127.0.0.1", 0)):
        subprocess.run([sys.executable, "-c", ""], check=True)
"""
CHILD = """
import subprocess
def test_forgets_a_child():
    test_forgets_a_child.kept = subprocess.Popen(["sleep", "600"])
"""
ORPHAN = """
import subprocess
def test_forgets_a_child_of_a_child():
    is_there = "until grep -q sleep /proc/$!/comm; do :; done"  # while it is being started it has no environment
    subprocess.run(["sh", "-c", "sleep 600 & " + is_there], check=True)
"""
FORKED = """
import os, time
def test_forgets_a_forked_child():
    if os.fork() == 0:
        time.sleep(600)
"""
SERVED = """
import multiprocessing, time
def test_forgets_a_child_of_the_fork_server():
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,)).start()
"""
PORT = """
import socket
def test_forgets_a_port():
    test_forgets_a_port.kept = socket.create_server(("127.0.0.1", 0))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "complaint", "workers"),
    [
        pytest.param(CLEAN, None, [], id="clean"),
        pytest.param(CHILD, "left processes running", [], id="child"),
        pytest.param(ORPHAN, "left processes running", [], id="orphan"),
        pytest.param(FORKED, "left processes running", [], id="forked"),
        pytest.param(SERVED, "left processes running", [], id="served"),
        pytest.param(PORT, "left ports open", [], id="port"),
        pytest.param(ORPHAN, "left processes running", ["-n", "1"], id="xdist"),
    ],
)
def test_run_fails_when_something_is_left(
    tmp_path: Path, source: str, complaint: str | None, workers: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(GUARD.read_text().replace("GRACE = 5.0", "GRACE = 0.5"))
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == (1 if complaint else 0), result.stdout + result.stderr
    assert (complaint or "1 passed") in result.stdout
