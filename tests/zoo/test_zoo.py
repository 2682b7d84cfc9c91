"""The program that tries the optimizers of other people: none can stop it, and its table says what came of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT
from tests.zoo.outcome import Kind, Outcome
from tests.zoo.table import BEGIN, END, counts, table, write


@pytest.mark.processes  # it ends a process that hangs
def test_no_optimizer_stops_the_others() -> None:
    command = [sys.executable, "-m", "tests.zoo.misbehaving"]  # not forked: it has children of its own
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["SGD"] == ["EQUAL", ""]
    kind, why = found["Ending"]
    assert kind == "WRONG"
    assert "the process ended with 3" in why
    kind, why = found["Hanging"]
    assert kind == "WRONG"
    assert why.startswith("hang")
    assert "in step" in why  # where it was


FOUND = {
    ("a.One", "alone"): Outcome(Kind.EQUAL),
    ("a.One", "newcomer"): Outcome(Kind.REFUSED, "it keeps | an\nobject"),
    ("b.Two", "alone"): Outcome(Kind.NONE, "it needs a GPU"),
    ("b.Two", "newcomer"): Outcome(Kind.NONE, "it needs a GPU"),
}


def test_the_table_has_a_row_for_each_and_a_reason_for_what_is_not_equal() -> None:
    lines = table(FOUND, ["a.One", "b.Two", "c.Three"], ["alone", "newcomer"]).splitlines()
    assert lines[2:] == [
        r"| `a.One` | = | refused | newcomer: it keeps \| an object |",
        "| `b.Two` | - | - | it needs a GPU |",
    ]
    assert "| refused |  | 1 |" in counts(FOUND, ["alone", "newcomer"])


def test_it_is_written_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nText\n")
    for block in ("first", "second"):
        write(page, block)
        assert page.read_text() == f"# Title\n\n{BEGIN}\n\n{block}\n\n{END}\n\nText\n"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="has no two lines"):
        write(page, "block")
