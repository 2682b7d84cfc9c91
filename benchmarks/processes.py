"""Worker processes of a benchmark: each in a session of its own, asked through pipes, measured in /proc, always ended.

A session names "the peer and everything that it started": hivemind forks two servers and a Go daemon per peer, and all
of them keep the session id of the worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A worker failed, died, or did not answer in time; the message holds its own words or the end of its log."""


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/<pid>/stat, as far as it is of use here."""

    pid: int
    state: str
    session: int
    threads: int


def read_stat(pid: int) -> ProcessStat | None:
    """Reads a process's state, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    return ProcessStat(pid, fields[0], int(fields[3]), int(fields[17]))


def session_processes(session: int) -> list[ProcessStat]:
    """All living processes of a session."""
    stats = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None and stat.session == session and stat.state not in "ZX"]


def cpu_seconds(sessions: Iterable[int]) -> float:
    """User and system time that the living processes of the sessions have spent so far, in seconds."""
    total = 0.0
    for session in sessions:
        for stat in session_processes(session):
            with contextlib.suppress(OSError):  # it ended meanwhile
                # The process's CPU clock, as clock_getcpuclockid(3) names it: /proc tells hundredths of a second.
                total += time.clock_gettime((~stat.pid << 3) | 2)
    return total


def pss_bytes(sessions: Iterable[int]) -> int:
    """Proportional set size of the sessions, in bytes: shared pages are split among the processes that map them."""
    total = 0
    for session in sessions:
        for stat in session_processes(session):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                for line in Path(f"/proc/{stat.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
    return total


def tree_with(before: Path, folder: Path) -> Path:
    """A tree in which these benchmarks' workers run with Shoal as it is in the checkout `before`; made in `folder`."""
    tree = folder / "before"
    tree.mkdir()
    (tree / "shoal").symlink_to(before / "shoal")
    (tree / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tree


def checkout(path: str) -> Path:
    """The argument of an option: a checkout of Shoal."""
    if not (Path(path) / "shoal" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} is no checkout of Shoal")
    return Path(path).resolve()


def add_before(parser: argparse.ArgumentParser) -> None:
    """The option `--before`."""
    parser.add_argument(
        "--before",
        type=checkout,
        metavar="PATH",
        help="a worktree of another commit, whose Shoal takes turns with this one; PYTHONPATH must have what it needs "
        "and this one does not",
    )


class PeakMemory:
    """Samples `pss_bytes` of some sessions while the `with` block runs; `peak` is the largest sample, in bytes."""

    INTERVAL = 0.05  # seconds between samples; one sample of 4 hivemind peers takes some ms

    def __init__(self, sessions: Sequence[int]) -> None:
        self.peak = 0
        self._sessions = sessions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, pss_bytes(self._sessions))
            self._stop.wait(self.INTERVAL)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


class Worker:
    """One worker process that answers JSON lines (see `benchmarks.workers.link`); its stderr goes to `log`. It runs in
    `tree`, a checkout or what `tree_with` has made; `within` is a command that starts it elsewhere, as `ip netns exec`
    does, and becomes the worker itself."""

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        tree: Path = ROOT,
        within: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{module.rpartition('.')[2]} {' '.join(arguments)}"
        self._log = log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*within, python, "-m", module, *arguments],
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},  # the peers fill the cores already
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)

    @property
    def session(self) -> int:
        """The session id that the worker and all that it starts share; also the worker's pid."""
        return self._process.pid

    def send(self, command: str, **arguments: Any) -> None:
        """Gives a command; `receive` must be called for its answer before the next one."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: receive says so, with its log
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Any:
        """Waits at most `timeout` seconds for the answer to the last command; raises `WorkerError`."""
        deadline = time.monotonic() + timeout
        while True:
            died = self._process.poll() is not None  # looked at first: its last words may still be in the queue
            try:
                answer = json.loads(self._answers.get(timeout=0.2))
            except queue.Empty:
                if died:
                    raise WorkerError(f"{self.name} died ({self._process.returncode}); {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise WorkerError(f"{self.name}: no answer in {timeout} s; {self._last_words()}") from None
                continue
            if "error" in answer:
                raise WorkerError(f"{self.name}: {answer['error']}")
            return answer["result"]

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """`send`, then `receive`."""
        self.send(command, **arguments)
        return self.receive(timeout)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "the end of its log:\n" + "\n".join(lines)

    def kill(self) -> None:
        """SIGKILL to the worker alone, not to what it started; returns when it is dead."""
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """Ends the worker's input: it closes its peer and exits."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def stop(self, patience: float) -> None:
        """Ends the worker and everything in its session: politely for `patience` seconds, then by SIGKILL."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        deadline = time.monotonic() + 10
        while (rest := session_processes(self.session)) and time.monotonic() < deadline:
            for stat in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stat.pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait(10)
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


def end_on_signals() -> None:
    """Makes SIGTERM raise SystemExit, so that `finally` blocks end the workers as they do after Ctrl-C."""

    def leave(_signal: int, _frame: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
