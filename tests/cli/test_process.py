"""A child process: what it says arrives, and nothing of it stays."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.cli.demo.process import Line, PeerProcess

pytestmark = pytest.mark.processes

ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)"
STUBBORN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(100)"


@contextmanager
def child(code: str, folder: Path) -> Iterator[tuple[PeerProcess, queue.SimpleQueue[Line]]]:
    lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
    process = PeerProcess(7, [sys.executable, "-c", code], lines, folder / "log")
    try:
        yield process, lines
    finally:
        process.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_words_go_in_and_lines_come_out(tmp_path: Path) -> None:
    with child(ECHO, tmp_path) as (process, lines):
        process.say("start")
        assert lines.get(timeout=60) == Line(7, b"START\n")


def test_an_end_is_told_with_exit_code_and_last_words(tmp_path: Path) -> None:
    with child("import sys; sys.exit('no text')", tmp_path) as (process, lines):
        assert lines.get(timeout=60) == Line(7, None)
        assert process.exit_code() == 1
        assert process.last_words() == "no text"
        process.say("anyone there?")


def test_closing_ends_a_child_that_ignores_signals(tmp_path: Path) -> None:
    with child(STUBBORN, tmp_path) as (process, lines):
        assert lines.get(timeout=60).text == b"deaf\n"
        assert is_alive(process.pid)
    assert not is_alive(process.pid)


def test_a_child_that_does_not_stop_is_killed_after_its_time(tmp_path: Path) -> None:
    with child(STUBBORN, tmp_path) as (process, lines):
        lines.get(timeout=60)
        assert process.exit_code(timeout=0.1) == -signal.SIGKILL


SWARM = """
import signal
import sys
from pathlib import Path
from shoal.cli.demo.settings import DemoSettings
from shoal.cli.demo.swarm import Swarm
class View:
    def update(self, record): pass
    def note(self, text): print(text, flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
settings = DemoSettings(out=Path(sys.argv[1]), epochs=100_000)
with Swarm(settings, View(), command=(sys.executable, sys.argv[2], "deaf")) as swarm:
    swarm.run()
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_peer_outlives_its_parent(tmp_path: Path, ending: signal.Signals) -> None:
    fake_peer = Path(__file__).with_name("fake_peer.py")
    parent = subprocess.Popen(
        [sys.executable, "-c", SWARM, str(tmp_path), str(fake_peer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids: list[int] = []
    try:
        for line in parent.stdout:
            if line.startswith("started"):
                pids.append(int(line.rpartition("process ")[2].rstrip(")\n")))
            if line.startswith("training begins"):
                break
        assert len(pids) == 4
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(ending)
        parent.wait(timeout=60)
        assert all(wait_until_gone(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()
