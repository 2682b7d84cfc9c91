"""The script, with peers that only pretend to train: kill, newcomer, failures, and that no process stays."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.demo.report import write_report
from shoal.cli.demo.script import Demo, DemoSettings, PeerState

pytestmark = pytest.mark.processes


def run(folder: Path, how: str, *, kill: bool = True) -> tuple[Demo, list[str], str]:
    output = io.StringIO()
    console = Console(file=output, width=120, markup=False)
    demo = Demo(DemoSettings(out=folder, epochs=20, kill=kill), console, f"tests.cli.fake_peer:{how}")
    demo.run()
    shown = output.getvalue()
    assert not any(child.process.is_alive() for child in demo.children)
    return demo, write_report(demo, console), shown


def test_one_peer_is_killed_a_newcomer_joins_and_all_is_well(tmp_path: Path) -> None:
    demo, problems, shown = run(tmp_path, "well")
    assert problems == []
    finished, killed = PeerState.FINISHED, PeerState.KILLED
    assert [child.state for child in demo.children] == [finished, finished, finished, killed, finished]
    assert "with SIGKILL after epoch 8" in shown
    assert "started newcomer 4" in shown
    assert "newcomer 4: downloaded the state" in shown
    assert "held-out loss 1.600" in shown
    assert "peer 1: epoch 10, state digest 10" in shown
    assert "epoch 9" not in shown
    assert "\x1b" not in shown


def test_nobody_is_killed_when_that_is_not_wanted(tmp_path: Path) -> None:
    demo, problems, _ = run(tmp_path, "well", kill=False)
    assert problems == []
    assert all(child.state is PeerState.FINISHED for child in demo.children)


def test_a_peer_that_fails_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    demo, problems, _ = run(tmp_path, "crash")
    assert problems == ["peer 1 ended with exit code 1: the fake peer fails as it was told"]
    assert demo.children[2].state is PeerState.FINISHED


def test_different_digests_fail_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "differ")[1] == ["the peers had different states in epochs [3]"]


PARENT = """
import signal
import sys
from rich.console import Console
from pathlib import Path
from shoal.cli.demo.script import Demo, DemoSettings
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
    settings = DemoSettings(out=Path(sys.argv[1]), epochs=100_000)
    Demo(settings, Console(file=sys.stdout), "tests.cli.fake_peer:deaf").run()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_peer_outlives_its_parent(tmp_path: Path, ending: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, "-u", str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids: list[int] = []
    try:
        for line in parent.stdout:
            if "started" in line:
                pids.append(int(line.rpartition("process ")[2].rstrip(")\n")))
            if "training begins" in line:
                break
        assert len(pids) == 4
        assert all(map(is_alive, pids))
        parent.send_signal(ending)
        parent.wait(timeout=60)
        deadline = time.monotonic() + 60.0
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_alive, pids))
    finally:
        parent.kill()
        parent.wait()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()
