"""`shoal monitor` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.monitor.processes import Trainers


@contextmanager
def monitor(peers: Trainers, history: Path, *, end: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """The address of its page; it is ended by that signal."""
    command = [sys.executable, "-m", "shoal", "monitor", "test", "--port", "0", "--history", str(history)]
    command += ["--initial-peers", peers.addresses[0]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        yield address
        process.send_signal(end)
        assert process.wait(timeout=60) == (-end if end is signal.SIGKILL else 0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
