"""What `benchmarks.beside` compares, made by two peers in this process: rounds, matchmaking, accumulating steps."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.workers.link import answer, fill
from benchmarks.workers.trainer import draw, make_model

ROUND_ELEMENTS, MATCHMAKING_ELEMENTS = 6_000_000, 1000
MATCHMAKINGS, STEPS, BATCH = 10, 10, 32  # of one turn; the last in samples
MODEL = "6.3M"
NEVER = 1 << 40  # samples: the steps only accumulate


class Pair:
    """Two peers that average one vector.

    Args:
        dhts: of the two.
        name: of the run.
        elements: of the vector.
    """

    def __init__(self, dhts: list[shoal.DHT], name: str, elements: int) -> None:
        self.vectors = [torch.zeros(elements) for _ in dhts]
        self._averagers = [
            shoal.DecentralizedAverager([vector], dht=dht, prefix=name, target_group_size=2, start=True)
            for vector, dht in zip(self.vectors, dhts, strict=True)
        ]
        for rank, vector in enumerate(self.vectors):
            fill(vector, rank)

    def round(self) -> None:
        """Average once. Raises RuntimeError if the two did not average together."""
        futures = [averager.step(wait=False) for averager in self._averagers]
        for group in [future.result() for future in futures]:
            if group is None or len(group) != 2:
                raise RuntimeError(f"a round of {len(group)} members")

    def close(self) -> None:
        """Leave the run."""
        for averager in self._averagers:
            averager.shutdown()


class Beside:
    """All that is measured, with the Shoal of this worker's tree."""

    def __init__(self) -> None:
        first = shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        second = shoal.DHT(first.get_visible_maddrs(), start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._dhts = [first, second]
        self._large = Pair(self._dhts, "large", ROUND_ELEMENTS)
        self._small = Pair(self._dhts, "small", MATCHMAKING_ELEMENTS)
        self._model = make_model(MODEL)
        self._generator = torch.Generator().manual_seed(0)
        self._optimizer = shoal.Optimizer(
            dht=first,
            run_id="accumulates",
            target_batch_size=NEVER,
            batch_size_per_step=BATCH,
            params=self._model.parameters(),
            optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        )

    def round(self) -> float:
        """One round of a large vector."""
        self._large.round()
        return 0.0

    def matchmaking(self) -> float:
        """Rounds of a small vector."""
        for _ in range(MATCHMAKINGS):
            self._small.round()
        return 0.0

    def accumulate(self) -> float:
        """Steps that only accumulate. Returns the CPU seconds of forward and backward passes, which are torch's."""
        passes = 0.0
        for _ in range(STEPS):
            inputs, targets = draw(BATCH, self._generator)
            before = time.process_time()
            nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            passes += time.process_time() - before
            self._optimizer.step()
            self._optimizer.zero_grad()
        return passes

    def measure(self, command: str) -> dict[str, Any]:
        """CPU seconds of this process, and seconds, of one turn."""
        cpu, started = time.process_time(), time.monotonic()
        foreign = getattr(self, command)()
        return {"cpu": time.process_time() - cpu - foreign, "seconds": time.monotonic() - started}

    def close(self) -> None:
        """Leave all runs."""
        self._optimizer.shutdown()
        for pair in (self._large, self._small):
            pair.close()
        for dht in self._dhts:
            dht.shutdown()


def main() -> None:
    """Answers commands until stdin ends."""
    torch.set_num_threads(1)
    beside = Beside()
    print("ready", file=sys.stderr)
    answer(beside.measure, beside.close)


if __name__ == "__main__":
    main()
