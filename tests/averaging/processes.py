"""Peers as real processes: starts `worker.py` several times, and stops every one of them whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class PeerProcess:
    """A worker, spoken to in JSON lines."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.averaging.worker", json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any] | None:
        """The next answer; None if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def started(self) -> None:
        answer = self.hear()
        assert answer is not None, "the worker ended before it was ready"
        self.addresses: list[str] = answer["addresses"]
        self.peer: str = answer["peer"]

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        answer = self.hear()
        assert answer is not None, "the worker ended instead of answering"
        return answer

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def running(count: int, elements: int, **averager: Any) -> Iterator[list[PeerProcess]]:
    """`count` workers with a vector of `elements` float32 that have met; killed at the end if they are still there."""
    options: dict[str, Any] = {"elements": elements, "averager": {"prefix": "test", **averager}}
    peers = [PeerProcess(options)]
    try:
        peers[0].started()
        options["initial_peers"] = peers[0].addresses
        peers += [PeerProcess(options) for _ in range(count - 1)]
        for peer in peers[1:]:
            peer.started()
        yield peers
    finally:
        for peer in peers:
            peer.end()


def all_round(
    peers: list[PeerProcess], values: list[float] | None = None, **options: Any
) -> list[dict[str, Any] | None]:
    """One round of all peers, the i-th with a vector full of `values[i]` (i by default); what each answers."""
    for number, peer in enumerate(peers):
        peer.tell(do="round", value=float(number) if values is None else values[number], **options)
    return [peer.hear() for peer in peers]
