"""One peer that shares a state, or downloads it. Arguments: rank (0 shares), elements.

With `begin` it becomes a trainer instead: 33 million parameters and Adam's two statistics of each, 400 MB. The first
peer trains, the other downloads from it.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.workers.link import answer, error, fill
from benchmarks.workers.trainer import draw, make_model

BATCH = 32
TARGET = 1 << 30  # samples of an epoch: none ends by itself


class DownloadPeer:
    """A donor or a newcomer."""

    def __init__(self, rank: int, elements: int) -> None:
        self._rank, self._elements = rank, elements
        self._steps: list[dict[str, float]] = []
        self._ending = threading.Event()

    def open(self, initial_peers: list[str]) -> list[str]:
        """Starts the DHT and an averager whose state is one tensor."""
        torch.set_num_threads(1)
        vector = torch.zeros(self._elements)
        if self._rank == 0:
            fill(vector, 0)
        self._dht = shoal.DHT(initial_peers=initial_peers, start=True)
        self._averager = shoal.DecentralizedAverager([vector], self._dht, prefix="tensor", start=True)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def load(self) -> float:
        """Seconds of one download of the averager's state."""
        started = time.monotonic()
        state = self._averager.load_state_from_peers()
        seconds = time.monotonic() - started
        if state is None:
            raise RuntimeError("there was no donor")
        (self._loaded,) = state[1]
        return seconds

    def error(self, size: int) -> float:
        """Largest error of what was downloaded, which is let go of."""
        loaded = self._loaded
        del self._loaded
        return error(loaded, size)

    def begin(self) -> None:
        """Makes a model and an optimizer. The first peer ends an epoch alone, so that its state is there."""
        self._averager.shutdown()
        del self._averager
        self._model = make_model("33M")
        self._optimizer = shoal.Optimizer(
            dht=self._dht,
            run_id="trainer",
            target_batch_size=TARGET,
            params=self._model.parameters(),
            optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
            matchmaking_time=1.0,
        )
        self._generator = torch.Generator().manual_seed(0)
        if self._rank == 0:
            self._step(TARGET)

    def _step(self, samples: int) -> None:
        inputs, targets = draw(BATCH, self._generator)
        nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(batch_size=samples)
        self._optimizer.zero_grad()

    def train(self) -> None:
        """Trains in a thread until `stop`."""
        self._ending.clear()
        self._steps = []
        self._trainer = threading.Thread(target=self._train)
        self._trainer.start()

    def _train(self) -> None:
        while not self._ending.is_set():
            wall, own, process = time.monotonic(), time.thread_time(), time.process_time()
            self._step(BATCH)
            step = {"at": wall, "own": time.thread_time() - own, "process": time.process_time() - process}
            self._steps.append(step | {"seconds": time.monotonic() - wall})

    def stop(self) -> list[dict[str, float]]:
        """Ends the training. Of each step: when it began, on the monotonic clock, its seconds, and CPU seconds of its
        own thread and of the whole process."""
        self._ending.set()
        self._trainer.join()
        return self._steps

    def load_often(self, times: int) -> dict[str, Any]:
        """Downloads the trainer's state so many times in a row: from when to when, and seconds of each."""
        begun, seconds = time.monotonic(), []
        for _ in range(times):
            started = time.monotonic()
            if not self._optimizer.load_state_from_peers():
                raise RuntimeError("nothing was downloaded")
            seconds.append(time.monotonic() - started)
        return {"begun": begun, "ended": time.monotonic(), "seconds": seconds}

    def close(self) -> None:
        """Leaves everything."""
        for name in ("_optimizer", "_averager", "_dht"):
            if hasattr(self, name):
                getattr(self, name).shutdown()

    def handle(self, command: str, **arguments: Any) -> Any:
        """The methods above, by name."""
        if command not in ("open", "load", "error", "begin", "train", "stop", "load_often"):
            raise ValueError(f"no command is named {command!r}")
        return getattr(self, command)(**arguments)


if __name__ == "__main__":
    rank, elements = sys.argv[1:]
    peer = DownloadPeer(int(rank), int(elements))
    answer(peer.handle, peer.close)
