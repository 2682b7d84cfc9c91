"""What a run was like is kept in a file: it survives, gets coarser with age, and stays small."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.health.record import FaultKind
from shoal.monitor.history import EVERY_SECONDS, RunHistory
from shoal.monitor.picture import Picture
from shoal.monitor.snapshot import PeerView, Snapshot
from shoal.p2p.identity import PeerID
from tests.health.records import START, posted

HOUR, DAY = 3600, 86400
NOW = 1_760_000_000 // 600 * 600


def snapshot_of(peers: int, **differing: Any) -> Snapshot:
    picture = Picture("my run")
    faults = dict.fromkeys(FaultKind, 3)
    posts = [posted(PeerID(bytes([number]) * 32), faults=faults, **differing) for number in range(peers)]
    picture.read(posts, 0.0, 0.0, START)
    return picture.snapshot(0.0, START)


def later(snapshot: Snapshot, at: float, **differing: Any) -> Snapshot:
    peers: tuple[PeerView, ...] = tuple(replace(peer, **differing) for peer in snapshot.peers)
    return replace(snapshot, at=at, peers=peers, **differing)


def test_it_survives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "history.sqlite"
    with RunHistory(file, "my run") as history:
        history.add(replace(snapshot_of(3), at=NOW))
    with RunHistory(file, "my run") as history:
        history.add(replace(snapshot_of(2, loss=0.25), at=NOW + 10))
        series = history.series(NOW + 11, HOUR)
    assert (series["at"], series["loss"], series["peers"]) == ([NOW, NOW + 10], [0.5, 0.25], [3, 2])
    assert series["exchange"] == [pytest.approx(0.3)] * 2
    history.close()


def test_old_points_become_fewer_and_stay_right() -> None:
    with RunHistory(":memory:", "my run") as history:
        one = snapshot_of(2)
        for number in range(0, 3 * HOUR, EVERY_SECONDS):
            history.add(later(one, NOW + number, epoch=number, loss=float(number % 60), samples_per_second=7.0))
        series = history.series(NOW + 3 * HOUR, 3 * HOUR)
        assert len(series["at"]) <= 1000
        old = [n for n, at in enumerate(series["at"]) if at < NOW + HOUR]
        assert 55 <= len(old) <= 60  # one a minute
        assert {series["loss"][n] for n in old} == {25.0}  # the mean of 0, 10, … 50
        assert {series["samples_per_second"][n] for n in old} == {7.0}
        assert [series["epoch"][n] for n in old][:2] == [50, 110]  # the furthest of each minute
        recent = [at for at in series["at"] if at >= NOW + 2 * HOUR + 600]
        assert len(recent) >= 230  # as they were, but for what one answer may have
        history.fold(NOW + 3 * HOUR)
        series = history.series(NOW + 3 * HOUR, 3 * HOUR)
        history.fold(NOW + 3 * HOUR)  # again, for nothing
        assert history.series(NOW + 3 * HOUR, 3 * HOUR) == series
        history.fold(NOW + 3 * DAY)
        assert len(history.series(NOW + 3 * DAY, 4 * DAY)["at"]) == 18  # one in ten minutes
        history.fold(NOW + 100 * DAY)
        assert history.series(NOW + 100 * DAY, 101 * DAY)["at"] == []


def test_a_clock_that_was_ahead_leaves_no_mark(tmp_path: Path) -> None:
    """That of the monitor, which is set right: what comes then is kept, shown, and made fewer as ever."""
    file, one = tmp_path / "history.sqlite", snapshot_of(2)
    with RunHistory(file, "my run") as history:
        history.add(later(one, NOW + 40 * DAY))
        for number in range(0, 2 * HOUR, EVERY_SECONDS):
            history.add(later(one, NOW + number, loss=1.0))
        series = history.series(NOW + 2 * HOUR, 40 * DAY)
        assert max(filter(None, series["at"])) < NOW + 2 * HOUR
        kept = contextlib.closing(sqlite3.connect(file))
        with kept as other:
            (rows,) = other.execute("SELECT count(*) FROM run WHERE at < ?", (NOW + HOUR - 600,)).fetchone()
        assert rows == 50  # one a minute


def test_what_nobody_told_is_a_gap() -> None:
    with RunHistory(":memory:", "my run") as history:
        history.add(replace(snapshot_of(1, loss=None, last=None), at=NOW))
        history.add(replace(snapshot_of(0), at=NOW + 10))  # nobody is there
        series = history.series(NOW + 20, HOUR)
    assert (series["at"], series["loss"], series["exchange"]) == ([NOW], [None], [None])


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    RunHistory(file, "my run").close()
    with pytest.raises(ValueError, match="has the history of the run 'my run', in format 1: name another file"):
        RunHistory(file, "another")


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a text that is longer than nothing" * 100)
    with pytest.raises(ValueError, match="is no history of a run"):
        RunHistory(file, "my run")
    assert file.read_text().startswith("a text")
    with pytest.raises(OSError, match="can't be kept"):
        RunHistory(tmp_path, "my run")


@pytest.mark.long
def test_a_day_is_small_whoever_says_how_it_is(tmp_path: Path) -> None:
    """In an open run a stranger may publish records of 64 peers, and ten seconds later of 64 others."""
    file = tmp_path / "history.sqlite"
    one = snapshot_of(64)
    with RunHistory(file, "my run") as history:
        for number in range(0, DAY, EVERY_SECONDS):
            peers = tuple(replace(peer, name=f"{number}.{index}") for index, peer in enumerate(one.peers))
            history.add(replace(one, at=NOW + number, peers=peers, epoch=number, loss=1 / (1 + number)))
        most = size_of(tmp_path)
        series = history.series(NOW + DAY, DAY)
    print(f"a day takes {size_of(tmp_path) / 1e6:.1f} MB, {most / 1e6:.1f} MB while it is written")
    assert most < 10e6
    assert 500 < len(series["at"]) <= 1000
    assert set(series["peers"]) == {64}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_nothing_is_written_of_a_peer(tmp_path: Path) -> None:
    """So the file does not grow with the number of those who say that they are in the run."""
    sizes = []
    for peers in (1, 200):
        folder = tmp_path / str(peers)
        with RunHistory(folder / "history.sqlite", "my run") as history:
            history.add(replace(snapshot_of(peers), at=NOW))
        sizes.append(size_of(folder))
    assert sizes[0] == sizes[1]


def test_what_earlier_versions_wrote_of_each_peer_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    with RunHistory(file, "my run") as history:
        history.add(replace(snapshot_of(3), at=NOW))
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("CREATE TABLE peers (peer INTEGER PRIMARY KEY, name TEXT UNIQUE)")
        db.execute("CREATE TABLE points (at INTEGER, peer INTEGER, epoch REAL, PRIMARY KEY (at, peer)) WITHOUT ROWID")
        db.executemany("INSERT INTO points VALUES (?, ?, 1)", [(NOW, number) for number in range(20000)])
    before = size_of(tmp_path)
    with RunHistory(file, "my run") as history:
        assert history.series(NOW + 1, HOUR)["peers"] == [3]
    assert size_of(tmp_path) < before / 2


def test_a_file_that_can_no_longer_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    with RunHistory(file, "my run") as history:
        history.add(replace(snapshot_of(1), at=NOW))
        with contextlib.closing(sqlite3.connect(file)) as other:
            other.execute("DROP TABLE run")
        with pytest.raises(OSError, match="the history can't be kept: no such table"):
            history.add(replace(snapshot_of(1), at=NOW + 10))
