"""The judge of the chaos sees each promise that is broken, and none that is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.promises import LEAST_SHARE, Life, Report, judge

BEGAN, STOPPED, ENDED = 100.0, 480.0, 500.0


def tip(epoch: int, side: str = "a") -> str:
    return f"{epoch}:{256 * epoch}:{side}{epoch}"


def epoch(number: int, side: str = "a", after: float = 0.0) -> list[dict[str, Any]]:
    at = {"time": BEGAN + number + after, "tip": tip(number, side), "digest": f"{number}{side}"}
    return [{"event": "epoch", **at}, {"event": "state", **at}]


def download(number: int, at: float) -> list[dict[str, Any]]:
    what = {"time": BEGAN + at, "tip": tip(number), "digest": f"{number}a"}
    return [{"event": "download", **what}, {"event": "state", **what}]


def life(name: str, epochs: range = range(1, 400)) -> Life:
    """One that makes all epochs, one a second."""
    lines = [line for number in epochs for line in epoch(number)]
    return Life(name, f"peer of {name}", BEGAN, 0.0, [], lines)


def fork(at: float, *, stays: bool, mine: str, other: str) -> dict[str, Any]:
    return {"event": "fork", "time": BEGAN + at, "stays": stays, "tip": mine, "other_tip": other}


def report(*lives: Life) -> Report:
    return judge(list(lives), BEGAN, STOPPED, BEGAN + 400)


@pytest.fixture
def lives() -> list[Life]:
    return [life("one"), life("two")]


def test_nothing_is_broken_where_all_is_well(lives: list[Life]) -> None:
    seen = report(*lives)
    assert seen.broken == []
    assert (seen.epochs, seen.usual, seen.share) == (399, 1.0, 1.0)
    assert seen.compared == 399
    assert (seen.forks, seen.unclear, seen.doubtful) == (0, 0, 0)


def test_one_that_ends_by_itself(lives: list[Life]) -> None:
    lives.append(Life("three", quit="its process ended with 3", ended=200.0))
    assert report(*lives).broken == ["three ended by itself: its process ended with 3"]


@pytest.mark.parametrize("event", ["epoch", "state"])
def test_states_that_differ_under_one_tip(lives: list[Life], event: str) -> None:
    lives[1].of(event)[50]["digest"] = "another"
    (broken,) = report(*lives).broken
    assert "51:13056:a51 differ: " in broken


def test_a_run_that_stands() -> None:
    seen = report(*(life(name, range(1, 200)) for name in ("one", "two")))
    assert seen.share < LEAST_SHARE
    assert seen.pause == pytest.approx(201)
    assert any("the run made 50% of its epochs" in broken for broken in seen.broken)
    assert any("the run stood for 201.0 s" in broken for broken in seen.broken)


def test_the_time_in_which_one_is_stopped_is_not_its_own() -> None:
    one = Life("one", "", BEGAN, 0.0, [(150.0, 190.0)], [*life("one", range(1, 50)).lines, *epoch(92)])
    one.lines += [line for number in range(93, 400) for line in epoch(number)]
    seconds, who = report(one, life("two")).slept_in
    assert (round(seconds, 6), who) == (3.0, "one")


def test_those_who_do_not_meet_in_the_end(lives: list[Life]) -> None:
    lives.append(Life("three", "", BEGAN, 0.0, [], [line for n in range(300, 400) for line in epoch(n, "b")]))
    assert any("have not met" in broken for broken in report(*lives).broken)


def forked(*, leaver_tells: bool, stayer_tells: bool) -> list[Life]:
    """Two of three stay; the third makes epochs of its own from 100 to 110 and comes back."""
    lives = [life("one"), life("two"), life("three", range(1, 101))]
    lives[2].lines += [line for number in range(101, 111) for line in epoch(number, "b")]
    if leaver_tells:
        lives[2].lines.append(fork(111, stays=False, mine=tip(110, "b"), other=tip(112)))
    lives[2].lines += download(112, 112.5)
    lives[2].lines += [line for number in range(113, 400) for line in epoch(number)]
    if stayer_tells:  # of what it has heard of the other side
        lives[0].lines.append(fork(111, stays=True, mine=tip(110), other=tip(108, "b")))
    return lives


def test_a_fork_that_both_sides_report() -> None:
    seen = report(*forked(leaver_tells=True, stayer_tells=True))
    assert seen.broken == []
    assert (seen.forks, seen.doubtful) == (1, 0)


def test_a_fork_that_one_side_does_not_report() -> None:
    (broken,) = report(*forked(leaver_tells=False, stayer_tells=True)).broken
    assert broken.startswith("a fork was not reported by who left its side: three left 110:")
    (broken,) = report(*forked(leaver_tells=True, stayer_tells=False)).broken
    assert broken.startswith("a fork was not reported by the side that stays: three left 110:")


def test_who_was_behind_has_left_no_side(lives: list[Life]) -> None:
    late = life("three", range(1, 100))
    late.lines += [*download(200, 200.5), *(line for number in range(201, 400) for line in epoch(number))]
    seen = report(*lives, late)
    assert seen.broken == []
    assert seen.forks == seen.unclear == 0


@pytest.mark.parametrize(("what", "more"), [("rss", 1 << 20), ("threads", 1), ("descriptors", 2)])
def test_what_grows(lives: list[Life], what: str, more: int) -> None:
    held = {"rss": 200 << 20, "threads": 9, "descriptors": 60}
    for at in range(0, 400, 5):
        grown = held | {what: held[what] + more * at // 5}
        lives[0].lines.append({"event": "held", "time": BEGAN + at, **grown})
        lives[1].lines.append({"event": "held", "time": BEGAN + at, **held})
    (broken,) = report(*lives).broken
    assert broken.startswith("one held ")
    assert what in broken
