"""The start page: one peer trains, a second joins it by its address, and both hold the same bits until it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
EPOCH = re.compile(r"^epoch (\d+): .* of (\d) peers?, .* state (\w{8}), ")


class Running:
    """A peer of the start page's script, and what it prints."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "examples" / "first_run.py"), *arguments]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()

    def wait_for(self, text: str, after: int = 0) -> str:
        """The first line from that number on that has the text."""
        with self._news:
            found = self._news.wait_for(lambda: [line for line in self.lines[after:] if text in line], 60)
        assert found, f"{text!r} was not printed: {''.join(self.lines)}"
        return found[0]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        self._reader.join()
        return status

    def states(self) -> dict[str, str]:
        """By epoch."""
        return {match[1]: match[3] for match in map(EPOCH.match, self.lines) if match}


@pytest.mark.long
@pytest.mark.alone
def test_two_peers_do_what_the_start_page_says() -> None:
    peers = [Running()]
    try:
        address = peers[0].wait_for("address: ").split()[-1]
        peers[0].wait_for("epoch 1: 16384 samples of 1 peer, ")
        peers.append(Running(address))
        peers[1].wait_for("downloaded the state of epoch ")
        peers[1].wait_for("of 2 peers", after=4)
        assert peers[1].end(signal.SIGINT) == 0  # Ctrl-C
        assert peers[1].lines[-1] == "leaving the run\n"
        peers[0].wait_for("of 1 peer,", after=len(peers[0].lines))
        assert peers[0].end(signal.SIGINT) == 0
    finally:
        for peer in peers:
            peer.end(signal.SIGKILL)
    first, second = (peer.states() for peer in peers)
    both = first.keys() & second.keys()
    assert len(both) > 1
    assert all(first[epoch] == second[epoch] for epoch in both)
