"""The history of a run: snapshots in an SQLite file. Of older times it keeps fewer.

A row describes the whole run, not a peer. So the size of the file depends only on time, whatever peers publish.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shoal.monitor.snapshot import Snapshot, Standing

EVERY_SECONDS = 10  # time between two snapshots that are kept
MAX_POINTS = 1000  # points in one answer
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Resolution:
    """Points that are older than `age` seconds are combined to one for every `step` seconds."""

    age: int
    step: int


LEVELS = (Resolution(3600, 60), Resolution(86400, 600))
LONGEST = 90 * 86400  # seconds for which anything is kept
FOLD_SECONDS = 600  # how often old points are combined

COLUMNS = (
    "epoch", "samples_behind", "loss", "samples_per_second", "epoch_seconds", "peers", "computing", "waiting",
    "matchmaking", "exchange", "step"
)  # fmt: skip
HIGHEST = ("epoch", "samples_behind")  # combined points have the maximum of these columns, and the mean of all others
MEANS = ", ".join(f"max({name})" if name in HIGHEST else f"avg({name})" for name in COLUMNS)

Series = dict[str, list[float | None]]


class RunHistory:
    """The history of one run. Any thread may call it.

    Args:
        path: the file, which is created if it does not exist; ":memory:" for no file.
        run_id: the name of the run.

    Raises:
        ValueError: if the file has the history of another run, or is no history.
        OSError: if the file can't be created.
    """

    def __init__(self, path: Path | str, run_id: str) -> None:
        self._lock = threading.Lock()
        self._folded_at = 0.0
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise OSError(f"the history can't be kept in {path}: {error}") from error
        try:
            self._begin(run_id)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ValueError(f"{path} is no history of a run ({error}): name another file") from error
        except ValueError as error:
            self._db.close()
            raise ValueError(f"{path} {error}: name another file") from None

    def _begin(self, run_id: str) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS about (format INTEGER, run TEXT)")
        columns = ", ".join(f"{name} REAL" for name in COLUMNS)
        self._db.execute(f"CREATE TABLE IF NOT EXISTS run (at INTEGER PRIMARY KEY, {columns})")
        self._db.execute("CREATE TABLE IF NOT EXISTS folded (step INTEGER PRIMARY KEY, until INTEGER)")
        about = self._db.execute("SELECT format, run FROM about").fetchone()
        if about is None:
            self._db.execute("INSERT INTO about VALUES (?, ?)", (FORMAT, run_id))
        elif about != (FORMAT, run_id):
            raise ValueError(f"has the history of the run {about[1]!r}, in format {about[0]}")
        if self._db.execute("SELECT name FROM sqlite_master WHERE name = 'points'").fetchone() is not None:
            # Earlier versions wrote a row for each peer, which nobody read.
            self._db.execute("DROP TABLE points")
            self._db.execute("DROP TABLE IF EXISTS peers")
            self._db.execute("VACUUM")

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> RunHistory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot. It replaces another one of the same second.

        Raises:
            OSError: if it can't be written, for example because the disk is full.
        """
        at, phases = int(snapshot.at), snapshot.phases
        here = [peer for peer in snapshot.peers if peer.standing is Standing.HERE]
        if not here:
            return
        times = [None] * 5 if phases is None else [getattr(phases, name) for name in COLUMNS[-5:]]
        run = [at, snapshot.epoch, snapshot.samples_behind, snapshot.loss, snapshot.samples_per_second]
        run += [snapshot.epoch_seconds or None, len(here), *times]
        try:
            with self._lock, self._db:
                self._db.execute("BEGIN")
                self._db.execute(f"INSERT OR REPLACE INTO run VALUES ({', '.join('?' * len(run))})", run)
            if not 0 <= snapshot.at - self._folded_at < FOLD_SECONDS:  # the clock may have been set back
                self._folded_at = snapshot.at
                self.fold(snapshot.at)
        except sqlite3.Error as error:
            raise OSError(f"the history can't be kept: {error}") from error

    def fold(self, now: float) -> None:
        """Combine old points, and drop the oldest ones. `add` calls this every FOLD_SECONDS."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            for level in LEVELS:
                done = self._db.execute("SELECT until FROM folded WHERE step = ?", (level.step,)).fetchone()
                since, until = 0 if done is None else done[0], int(now - level.age) // level.step * level.step
                if since > until:  # the clock was ahead at that time, so start from the beginning
                    since = 0
                if until > since:
                    self._fold(level.step, since, until)
                    self._db.execute("INSERT OR REPLACE INTO folded VALUES (?, ?)", (level.step, until))
            self._db.execute("DELETE FROM run WHERE at < ?", (int(now - LONGEST),))

    def _fold(self, step: int, since: int, until: int) -> None:
        begins, span = f"at / {step} * {step}", (since, until)
        self._db.execute(
            f"CREATE TEMP TABLE fewer AS SELECT {begins}, {MEANS} FROM run WHERE at >= ? AND at < ? GROUP BY {begins}",
            span,
        )
        self._db.execute("DELETE FROM run WHERE at >= ? AND at < ?", span)
        self._db.execute("INSERT OR REPLACE INTO run SELECT * FROM fewer")
        self._db.execute("DROP TABLE fewer")

    def series(self, now: float, seconds: float) -> Series:
        """The history of the last `seconds` seconds: the columns of at most MAX_POINTS points, and their times `at`. A
        point with a time in the future (the clock was ahead) is left out until then."""
        step = max(1, math.ceil(seconds / (MAX_POINTS - 1)))
        with self._lock:
            rows = self._db.execute(
                f"SELECT max(at), {MEANS} FROM run WHERE at >= ? AND at <= ? GROUP BY at / {step} ORDER BY at",
                (int(now - seconds), math.ceil(now)),
            ).fetchall()
        columns = list(zip(*rows, strict=True)) or [()] * (1 + len(COLUMNS))
        return {name: list(column) for name, column in zip(("at", *COLUMNS), columns, strict=True)}
