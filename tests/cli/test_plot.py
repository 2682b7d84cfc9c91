"""``shoal plot``: what traces tell, and its picture."""

from __future__ import annotations

import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.plot.story import Doing, Story, story_of
from shoal.health.trace import TraceEvent, TraceLine
from tests.cli.test_command import shoal_command

pytest.importorskip("matplotlib")
from shoal.cli.plot import picture

Given = tuple[float, str, str] | tuple[float, str, str, dict[str, Any]]


def told(*lines: Given) -> Story:
    """The story of lines: time, replica, event, and other fields."""
    made = [
        {"time": each[0], "replica": each[1], "event": each[2], **(each[3] if len(each) > 3 else {})} for each in lines
    ]
    return story_of(msgspec.convert(made, list[TraceLine]))


def row(story: Story, name: str) -> str:
    """What a replica did in each second, as the first letters of it; a dot where nothing is known."""
    cells = picture.grid(story, round(story.end - story.begin))[list(story.replicas).index(name)]
    return "".join((".", *(doing.value[0] for doing in Doing))[cell] for cell in cells)


def test_a_replica_computes_where_nothing_else_is_told() -> None:
    story = told(
        (12, "a", "start", {"seconds": 2}),
        (17, "a", "waiting", {"seconds": 2}),
        (19, "a", "round", {"seconds": 2}),
        (20, "a", "step", {"epoch": 1, "samples": 8}),
        (22, "a", "downloading", {"seconds": 1}),
        (25, "a", "end"),
        (29, "b", "start"),
        (30, "b", "end"),
    )
    assert row(story, "a") == "sscccwwiiccdccc....."
    assert row(story, "b") == "." * 19 + "c"


def test_the_spans_of_a_driver_count_more_than_those_of_the_replica() -> None:
    """A replica that was stopped in a round takes it for a long round. One that was killed tells nothing."""
    story = told(
        (0, "a", "start"),
        (9, "a", "round", {"seconds": 8}),
        (10, "a", "step", {"epoch": 1, "samples": 8}),
        (18, "a", "start", {"seconds": 4}),
        (20, "a", "step", {"epoch": 2, "samples": 8}),
        (8, "a", "stopped", {"seconds": 5}),
        (15, "a", "dead", {"seconds": 2}),
    )
    # It was killed at 13: until then it has computed. Its successor is ready at 18.
    assert row(story, "a") == "ciisssssiccccddssscc"
    assert [len(story.replicas["a"][each]) for each in (Doing.STOPPED, Doing.DEAD)] == [1, 2]


def test_a_replica_that_has_not_written_its_end_is_dead() -> None:
    steps: list[Given] = [(2.0 * epoch, "b", "step", {"epoch": epoch, "samples": 8}) for epoch in range(1, 6)]
    until = [*steps[:2], *((at, "a", *rest) for at, _, *rest in steps[:2])]
    story = told((0, "a", "start"), (0, "b", "start"), *until, *steps)  # type: ignore[arg-type]
    assert (row(story, "a"), row(story, "b")) == ("ccccdddddd", "cccccccccc")
    # Until two epochs have ended without it, it may still be there.
    assert row(told((0, "a", "start"), (0, "b", "start"), *until, *steps[:3]), "a") == "cccc.."  # type: ignore[arg-type]
    # It was started anew.
    assert row(told((0, "a", "start"), (2, "a", "round"), (8, "a", "start", {"seconds": 3}), (9, "a", "end")), "a") == (
        "ccdddsssc"
    )


def test_each_step_counts_once_whoever_tells_of_it() -> None:
    story = told(
        (4.5, "b", "step", {"epoch": 7, "samples": 10, "loss": 2.0}),
        (4, "a", "step", {"epoch": 7, "samples": 10, "loss": 1.0}),
        (6, "a", "step", {"epoch": 8, "samples": 30}),
        (8, "b", "step", {"epoch": 9, "samples": 20, "loss": 0.5}),
        (8, "a", "lost", {"samples": 4, "reason": "late"}),
        (9, "b", "lost", {"samples": 4, "reason": "killed"}),
        (9, "b", "lost", {"samples": 3, "reason": "killed"}),
    )
    assert story.committed == [(4, 10), (6, 40), (8, 60)]
    assert story.losses == [(10, 1.5), (60, 0.5)]
    assert story.lost == {"late": 4, "killed": 7}
    assert picture.summary(story) == "2 replicas, 60 samples in 3 steps; lost: 7 killed, 4 late"


def test_replicas_are_in_the_order_of_their_numbers() -> None:
    names = ["r10", "r9", "r1b", "a"]
    assert list(told(*((1.0, name, "start") for name in names)).replicas) == ["a", "r1b", "r9", "r10"]


def test_the_shares_are_of_the_time_of_which_something_is_known() -> None:
    story = told((0, "a", "start"), (6, "a", "waiting", {"seconds": 3}), (8, "a", "end"), (10, "b", "end"))
    shares = picture.shares_of(picture.grid(story, 1000))
    assert shares[Doing.COMPUTING] == pytest.approx(5 / 8)
    assert shares[Doing.WAITING] == pytest.approx(3 / 8)


def written(folder: Path, name: str, *lines: dict[str, Any]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"time": 1.0, "replica": name, **line}) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_command_draws(tmp_path: Path, suffix: str) -> None:
    traces = [
        written(tmp_path, name, {"event": "start"}, {"event": "step", "time": 9.0, "epoch": 1, "samples": 5, "loss": 1})
        for name in ("r0", "r1")
    ]
    out = tmp_path / f"run{suffix}"
    done = shoal_command("plot", *map(str, traces), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 replicas, 5 samples in 1 step\ndrawn: {out}\n"
    assert out.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_texts_of_others_are_texts_in_the_picture(tmp_path: Path) -> None:
    """Neither tags, nor formulas, nor what ends a comment, nor what a terminal or XML refuses."""
    names = [
        "<script>alert(1)</script>",
        "--><b>",
        "$\\frac{",
        "$x$ & y",
        "a\x00\x1b[2J\ufffe\u202e",
        "n" * 10_000,
        "",
        "]]>",
    ]
    lines: list[Given] = [(1.0, name, "start") for name in names]
    lines += [(2.0, names[0], "lost", {"samples": 1, "reason": name}) for name in names]
    out = tmp_path / "run.svg"
    picture.draw(told(*lines), out)
    drawn = ElementTree.fromstring(out.read_text())
    assert not [each for each in drawn.iter() if each.tag.rpartition("}")[2] in ("script", "b")]
    assert "<script" not in out.read_text()
    assert len(out.read_text()) < 1_000_000


def test_many_replicas_and_hours_are_drawn_in_seconds(tmp_path: Path) -> None:
    """300 replicas and an epoch each half minute for four hours, in CPU time of a machine that is busy."""
    lines = [
        TraceLine(time=at, replica=f"r{number}", event=event, seconds=3.0, epoch=int(at), samples=1.0, loss=1.0)
        for number in range(300)
        for at in range(0, 4 * 3600, 30)
        for event in (TraceEvent.WAITING, TraceEvent.ROUND, TraceEvent.STEP)
    ]
    began = time.process_time()
    picture.draw(story_of(lines), tmp_path / "run.svg")
    assert time.process_time() - began < 30.0
    assert (tmp_path / "run.svg").stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("trace", "out", "says"),
    [
        (b"epoch 3\n", "run.svg", "r0.jsonl, line 1 is no event of a trace"),
        (b"", "run.svg", "no events in these traces"),
        (b"", "run.gif", "neither .svg nor .png"),
        (b'{"time": 1, "replica": "a", "event": "start"}\n', "nowhere/run.svg", "No such file"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, trace: bytes, out: str, says: str) -> None:
    (tmp_path / "r0.jsonl").write_bytes(trace)
    done = shoal_command("plot", "r0.jsonl", "--out", out, folder=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert [path.name for path in tmp_path.iterdir()] == ["r0.jsonl"]


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from shoal.cli import app

    for name in ("command", "picture"):
        monkeypatch.delitem(sys.modules, f"shoal.cli.plot.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(app, ["plot", str(written(tmp_path, "r0", {"event": "start"}))])
    assert done.exit_code == 1
    assert done.stderr == "shoal plot needs matplotlib.figure: pip install 'shoal[demo]'\n"
