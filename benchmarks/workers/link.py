"""The worker's end of the pipe: JSON commands in, JSON answers out, and the vector that all sides average alike."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

BLOCK = 1 << 20  # elements that are filled and checked at once: small, so that checking needs no second vector


class Peer(Protocol):
    """What a worker needs from one peer of one library."""

    vector: torch.Tensor  # float32, one-dimensional, on the CPU; `round` averages it in place

    def open(self, initial_peers: list[str]) -> list[str]:
        """Starts the peer and returns its addresses; the first peer of a swarm gets no initial peers."""

    def connect(self, addresses: list[list[str]]) -> None:
        """Called once when all peers are open, with what each `open` returned, in order."""

    def round(self) -> dict[str, Any]:
        """Averages `vector` once; answers at least `members` (int), `matchmaking` and `allreduce` (seconds)."""

    def close(self) -> None:
        """Stops all that `open` started."""


class BusyTrainer:
    """A thread that runs pure Python and wants the GIL all the time, while the `with` block runs."""

    def __init__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        count = 0
        while not self._stop:
            for number in range(10_000):
                count += number & 1

    def __enter__(self) -> BusyTrainer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, without a copy; valid as long as the tensor lives where it is."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def blocks(vector: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of consecutive parts of a vector."""
    for start in range(0, vector.numel(), BLOCK):
        yield vector[start : start + BLOCK]


def fill(vector: torch.Tensor, rank: int) -> None:
    """Writes peer `rank`'s contribution: normal noise, another for each peer."""
    generator = torch.Generator().manual_seed(rank)
    for block in blocks(vector):
        block.normal_(generator=generator)


def error(vector: torch.Tensor, size: int) -> float:
    """Largest distance of an element from the mean of `size` contributions."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    worst = 0.0
    for block in blocks(vector):
        noise = torch.empty_like(block)
        expected = torch.zeros_like(block)
        for generator in generators:
            expected.add_(noise.normal_(generator=generator), alpha=1 / size)
        worst = max(worst, expected.sub_(block).abs_().max().item())
    return worst


def run_round(peer: Peer, at: float, busy: bool) -> dict[str, Any]:
    """One round that begins at `at`, of the monotonic clock; while this process is `busy` with pure Python, or not."""
    if busy:
        with BusyTrainer():
            return run_round(peer, at, busy=False)
    time.sleep(max(0.0, at - time.monotonic()))
    started = time.monotonic()
    try:
        report = peer.round()
    except Exception as failure:  # noqa: BLE001 - whatever a library raises, the driver counts the round as failed
        traceback.print_exc()
        report = {"failure": repr(failure)}
    return {"started": started, "finished": time.monotonic(), **report}


def serve(peer: Peer, rank: int) -> None:
    """Answers commands about one vector that is averaged, until stdin ends; then closes the peer."""

    def handle(command: str, **arguments: Any) -> Any:
        match command:
            case "open":
                return peer.open(arguments["initial_peers"])
            case "connect":
                return peer.connect(arguments["addresses"])
            case "fill":
                return fill(peer.vector, rank)
            case "round":
                return run_round(peer, arguments["at"], arguments["busy"])
            case "digest":
                return hashlib.blake2b(bytes_of(peer.vector), digest_size=16).hexdigest()
            case "error":
                return error(peer.vector, arguments["size"])
        raise ValueError(f"no command is named {command!r}")

    answer(handle, peer.close)


def answer(handle: Callable[..., Any], close: Callable[[], None]) -> None:
    """Answers each command from stdin with what `handle(command, **arguments)` returns, until stdin ends; then closes.
    What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            try:
                result = handle(**json.loads(line))
            except Exception:  # noqa: BLE001 - it is answered, and the driver raises it
                answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            else:
                answers.write(json.dumps({"result": result}) + "\n")
    finally:
        close()
