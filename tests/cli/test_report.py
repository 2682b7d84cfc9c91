"""What the demo leaves in its folder and shows at its end and on the way."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.demo import report
from shoal.cli.demo.record import PeerState, Record
from shoal.cli.demo.report import write_report
from shoal.cli.demo.summary import summarise
from shoal.cli.demo.view import open_view
from tests.cli.runs import good_run, settings


def make_console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=120, force_terminal=terminal), output


def test_the_folder_holds_table_numbers_text_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record, console_and_output = good_run(), make_console()
    console, output = console_and_output
    write_report(record, summarise(record, settings(tmp_path)), console)
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.txt", "sample.txt", "loss.png"}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["loss_after"] == 1.6
    assert (tmp_path / "sample.txt").read_text() == "def f():"
    for text in ((tmp_path / "report.txt").read_text(), output.getvalue()):
        assert "yes, in 20 epochs" in text
        assert "1.5 s" in text


def test_problems_are_shown(tmp_path: Path) -> None:
    record = good_run()
    record.failures.append("peer 1 fell over")
    console, output = make_console()
    write_report(record, summarise(record, settings(tmp_path)), console)
    assert "problem: peer 1 fell over" in output.getvalue()


def test_a_short_run_says_what_it_was_too_short_for(tmp_path: Path) -> None:
    record = good_run()
    record.peers[4].committed.clear()
    console, output = make_console()
    write_report(record, summarise(record, settings(tmp_path)), console)
    assert "as promised, as far as 20 epochs show" in output.getvalue()
    assert "not reached in 20 epochs: the newcomer, peer 4, committed no epoch" in output.getvalue()
    assert "problem" not in output.getvalue()
    record.failures.append("peer 1 fell over")
    write_report(record, summarise(record, settings(tmp_path)), console)
    assert "1 problem " in output.getvalue()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    record = good_run()
    console, output = make_console()
    write_report(record, summarise(record, settings(tmp_path)), console)
    assert not (tmp_path / "loss.png").exists()
    assert "pip install 'shoal[demo]'" in output.getvalue()


def test_lines_tell_of_peers_rounds_and_losses_when_there_is_no_terminal() -> None:
    console, output = make_console()
    record = good_run()
    record.peers[1].state = PeerState.TRAINING
    with open_view(console, 20) as view:
        view.note("killed peer 3")
        view.update(record)
        view.update(record)
    lines = output.getvalue()
    assert "killed peer 3" in lines
    assert lines.count("held-out loss 1.600 at epoch 20") == 1
    assert "coordinator peer 2, round 0.20 s (matchmaking 0.010, all-reduce 0.15), 16.0 MB moved" in lines
    assert "peer 1: loss 2.100, 50 samples/s" in lines
    assert "\x1b" not in lines


def test_the_live_table_shows_every_peer() -> None:
    console, output = make_console(terminal=True)
    with open_view(console, 20) as view:
        view.update(good_run())
    shown = output.getvalue()
    assert "peer 2 *" in shown
    assert "killed" in shown
    assert "4.0 / 4.0 MB" in shown


def test_a_run_in_which_nothing_happened_yet_can_be_shown() -> None:
    for terminal in (False, True):
        console, _ = make_console(terminal=terminal)
        with open_view(console, 20) as view:
            view.update(Record())
