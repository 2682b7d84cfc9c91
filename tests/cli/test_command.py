"""The command line: quick answers, and clear errors for what cannot be run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal


def shoal_command(
    *arguments: str, folder: Path | None = None, module: str = "shoal.cli"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, check=False)


@pytest.mark.parametrize("module", ["shoal", "shoal.cli"])
def test_version(module: str) -> None:
    done = shoal_command("--version", module=module)
    assert (done.returncode, done.stdout) == (0, f"shoal {shoal.__version__}\n")


def test_the_package_is_the_command() -> None:
    done = shoal_command("demo", "--help", module="shoal")
    assert done.returncode == 0
    assert "Usage: shoal demo [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("demo",), "runs/demo-<time>"),
        (("top",), "/p2p/<peer id>"),
        (("monitor",), "runs/monitor-<run>.sqlite"),
        (("keys", "pin"), "<epoch>:<samples>:<lineage>"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_help_says_what_stands_for_what(command: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Markdown is drawn, what is in angle brackets and not in a code span is gone."""
    monkeypatch.setenv("COLUMNS", "200")
    assert says in shoal_command(*command, "--help").stdout


def test_the_demos_parent_imports_no_torch() -> None:
    code = "import sys, shoal.cli, shoal.cli.demo.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--peers", "1"), "use 2 or more"),
        (("--epochs", "3"), "use 10 or more"),
        (("--seed", "-1"), "use 0 or more"),
        (("--compression", "zip"), "float16"),
        (("--data", "/nowhere"), "does not exist"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = shoal_command("demo", *arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("short")
    done = shoal_command("demo", "--data", str(text), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "choose a longer" in " ".join(done.stderr.replace("│", "").split())


def test_results_do_not_go_into_a_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    done = shoal_command("demo", "--out", str(taken))
    assert done.returncode == 2
    assert "is a file" in " ".join(done.stderr.replace("│", "").split())
    assert taken.read_text() == "a file"
