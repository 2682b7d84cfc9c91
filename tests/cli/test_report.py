"""What a run comes to: its numbers, every reason for an exit code that is not 0, and what stays in its folder."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.demo.script import ENOUGH_EPOCHS
from tests.cli.fake_peer import report_of
from tests.cli.runs import EPOCHS, forget, good_run, reported, settings

RECOVERY = "seconds from SIGKILL to the next epoch"


def numbers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_a_good_run_has_no_problem_and_its_folder_has_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "peer-0.jsonl").write_text('{"time": 1, "replica": "peer-0", "event": "start"}\n')
    problems, shown = reported(good_run(settings(tmp_path)))
    assert problems == []
    assert {path.name for path in tmp_path.iterdir()} == {"peer-0.jsonl", "report.json", "run.png"}
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "yes, in 20 epochs" in shown
    assert "as promised" in shown
    assert "def f():" in shown
    assert f"kept in {tmp_path}" in shown.replace("\n", "")


def test_numbers(tmp_path: Path) -> None:
    reported(good_run(settings(tmp_path)))
    found = numbers(tmp_path)
    assert found["epochs committed"] == EPOCHS
    assert found["held-out loss before, nats per byte"] == 4.6
    assert found["held-out loss after, nats per byte"] == 1.6
    assert found["bigram model's loss, nats per byte"] == 2.4
    assert found["median seconds of an epoch"] == pytest.approx(1.0)
    assert found["median seconds of a round"] == pytest.approx(0.2)
    assert found[RECOVERY] == pytest.approx(109.6 - 108.1)
    assert found["seconds of the newcomer from ready to its first epoch"] == pytest.approx(117.04 - 115)
    assert found["first epoch of the newcomer"] == 17


def test_recovery_ignores_late_reports_of_the_epoch_before_the_kill(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.told["EpochReport"] = [
        (108.3 if given["epoch"] == 8 and child is not demo.children[3] else at, child, given)
        for at, child, given in demo.told["EpochReport"]
    ]
    reported(demo)
    assert numbers(tmp_path)[RECOVERY] == pytest.approx(109.6 - 108.1)


def test_different_digests_are_a_problem(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.told["EpochReport"].append((105.03, demo.children[3], report_of(5, "another")))
    problems, shown = reported(demo)
    assert problems == ["the peers had different states in epochs [5]"]
    assert "NO" in shown
    assert "not as promised" in shown
    assert "problem: the peers had different states" in shown


def test_a_downloaded_state_counts_as_one_of_its_epoch(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.told["DownloadReport"].append((116.0, demo.children[4], {"epoch": 16, "state_digest": "digest 16"}))
    assert reported(demo)[0] == []
    demo.told["DownloadReport"].append((116.0, demo.children[4], {"epoch": 15, "state_digest": "spoilt"}))
    assert reported(demo)[0] == ["the peers had different states in epochs [15]"]


def test_a_failure_is_a_problem(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.failures.append("peer 1 ended with exit code 1: boom")
    assert reported(demo)[0] == ["peer 1 ended with exit code 1: boom"]


@pytest.mark.parametrize(("epochs", "enough"), [(ENOUGH_EPOCHS - 1, False), (ENOUGH_EPOCHS, True)])
def test_a_loss_that_is_not_below_the_bigram_models_is_a_problem_where_there_was_time(
    epochs: int, enough: bool, tmp_path: Path
) -> None:
    demo = good_run(settings(tmp_path, epochs=epochs))
    demo.told["evaluated"][-1] = (121.0, demo.children[0], (epochs, 2.4))
    problems, shown = reported(demo)
    (said,) = problems + numbers(tmp_path)["unreached"]
    assert "2.400 is not below the bigram model's 2.400" in said
    assert bool(problems) == enough
    assert said.endswith("it takes some 60 epochs") == (not enough)
    assert ("as promised, as far as it went" in shown) == (not enough)


def test_a_loss_of_an_earlier_epoch_does_not_count_as_the_last(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.told["evaluated"][-1] = (121.0, demo.children[0], (EPOCHS - 1, 1.6))
    assert reported(demo)[0] == ["the held-out loss at the end was not measured"]
    assert numbers(tmp_path)["held-out loss after, nats per byte"] is None


def test_a_kill_that_never_happened_is_a_problem_only_when_it_was_asked_for(tmp_path: Path) -> None:
    for kill in (True, False):
        demo = good_run(settings(tmp_path, kill=kill))
        demo.killed_at = math.nan
        assert ["no peer was killed" in problem for problem in reported(demo)[0]] == [True] * kill


def test_no_epoch_after_the_kill_is_a_problem(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.killed_at = 200.0
    assert reported(demo)[0] == ["no peer was killed, or no epoch was committed after it"]


def test_a_newcomer_that_never_takes_part_is_a_problem_where_there_was_time(tmp_path: Path) -> None:
    for epochs, enough in ((EPOCHS, False), (ENOUGH_EPOCHS, True)):
        demo = good_run(settings(tmp_path, epochs=epochs))
        forget(demo, "EpochReport", 4)
        problems, shown = reported(demo)
        assert problems == ["no newcomer committed an epoch"] * enough
        assert ("not reached: no newcomer committed an epoch" in shown) == (not enough)
    demo.children.pop()
    assert reported(demo)[0] == ["no newcomer committed an epoch"]


def test_peers_that_each_train_alone_are_a_problem(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    forget(demo, "EpochReport", 1, 2, 3, 4)
    assert "no epoch was committed by more than one peer" in reported(demo)[0]


def test_a_run_in_which_nothing_happened_has_no_numbers_but_problems(tmp_path: Path) -> None:
    demo = good_run(settings(tmp_path))
    demo.told.clear()
    demo.children.clear()
    demo.killed_at = math.nan
    assert len(reported(demo)[0]) == 3
    assert numbers(tmp_path)["median seconds of a round"] is None
    assert len(numbers(tmp_path)["unreached"]) == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("command", "picture"):
        monkeypatch.delitem(sys.modules, f"shoal.cli.plot.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, shown = reported(good_run(settings(tmp_path)))
    assert not (tmp_path / "run.png").exists()
    assert "pip install 'shoal[demo]'" in shown
