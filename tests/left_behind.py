"""A run whose tests leave a process or a listening port behind fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

GRACE = 5.0
"""Seconds in which what the last test ended may still be on its way out."""

MARK = f"SHOAL_TEST_SESSION={os.getpid()}"
"""Environment entry by which a process is known as ours, even when its parent is gone."""

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that Python keeps for itself, and ends, until the interpreter exits."""


def _processes() -> dict[int, str]:
    """The command lines of living processes that this one started, directly or not, by process id."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
                    if MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        marked.add(int(entry.name))
            except OSError:
                continue  # it ended while we looked, or belongs to someone else
    # A forked child shows the environment that its parent began with, so it is found by its parent instead.
    family = {os.getpid()} | marked
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    commands: dict[int, str] = {}
    for pid in family - {os.getpid()}:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        # What a fork server has forked shows the server's command line, and is no child of this process.
        if parents[pid] != os.getpid() or not any(helper in command for helper in HELPERS):
            commands[pid] = command
    return commands


def _ports() -> set[int]:
    """TCP ports that this process listens on."""
    inodes: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # the descriptor of this very listing
    rows = [
        row.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if os.path.exists(table)
        for row in Path(table).read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the run when its tests leave a process or a listening port behind (per worker under xdist)."""
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    processes_before, ports_before = set(_processes()), _ports()
    yield
    deadline = time.monotonic() + GRACE
    while True:
        processes = {pid: command for pid, command in _processes().items() if pid not in processes_before}
        ports = _ports() - ports_before
        if not (processes or ports) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    assert not processes, f"tests left processes running (now killed): {processes}"
    assert not ports, f"tests left ports open: {sorted(ports)}"
