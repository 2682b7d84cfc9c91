"""Gradient accumulation: plain PyTorch, `shoal.Optimizer`, and `shoal.Optimizer` with `reuse_grad_buffers`, in turn.

    python -m benchmarks.accumulation [--models 0.3M 6.3M 10M 25M] [--rounds 15] [--threads 2]

What is timed is a step that only accumulates: forward, backward, and what is called after it. Plain PyTorch calls
nothing, and adds up in `.grad`, in the backward pass; Shoal calls `step()`, and by default `zero_grad()`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from benchmarks.workers.trainer import draw, make_model

RESULTS = Path(__file__).resolve().parent / "results"
SIDES = ("plain", "default", "reuse_grad_buffers")
BATCH, STEPS = 32, 10  # samples of a step, steps over which gradients are accumulated
PROMISED = {"10M": "<= 1.1"}
WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True)
class Accumulated:
    """Seconds per step, over one epoch: of the forward and backward pass, and of what is called after it."""

    passes: float
    calls: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.passes + self.calls


class Side:
    """One way to accumulate, with a model of its own.

    Args:
        name: of `SIDES`.
        size: of the model.
        dht: for Shoal.
    """

    def __init__(self, name: str, size: str, dht: shoal.DHT) -> None:
        self._model = make_model(size)
        self._generator = torch.Generator().manual_seed(0)
        self._clears = name == "default"
        self._optimizer: shoal.Optimizer | None = None
        if name != "plain":
            self._optimizer = shoal.Optimizer(
                dht=dht,
                run_id=f"{name} {size}",
                target_batch_size=STEPS * BATCH + 1,  # `end` brings the last
                batch_size_per_step=BATCH,
                params=self._model.parameters(),
                optimizer=functools.partial(torch.optim.SGD, lr=0.0),
                reuse_grad_buffers=name == "reuse_grad_buffers",
            )

    def accumulate(self) -> Accumulated:
        """The steps of one epoch, without its end."""
        passes = calls = 0.0
        for _ in range(STEPS):
            inputs, targets = draw(BATCH, self._generator)
            started = time.perf_counter()
            nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            ready = time.perf_counter()
            if self._optimizer is not None:
                self._optimizer.step()
                if self._clears:
                    self._optimizer.zero_grad()
            passes, calls = passes + ready - started, calls + time.perf_counter() - ready
        return Accumulated(passes / STEPS, calls / STEPS)

    def end(self) -> None:
        """The end of the epoch, which is not timed."""
        if self._optimizer is None:
            self._model.zero_grad()
            return
        epoch = self._optimizer.local_epoch
        while self._optimizer.local_epoch == epoch:
            inputs, targets = draw(1, self._generator)
            nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step(batch_size=1)

    def close(self) -> None:
        """Leave the run."""
        if self._optimizer is not None:
            self._optimizer.shutdown()


def measure(size: str, rounds: int) -> dict[str, list[Accumulated]]:
    """Epochs of all sides in turn; who begins changes from round to round."""
    found: dict[str, list[Accumulated]] = {name: [] for name in SIDES}
    with shoal.DHT(start=True) as dht:
        sides = [(name, Side(name, size, dht)) for name in SIDES]
        for turn in range(WARM_UP + rounds):
            sides.append(sides.pop(0))
            for name, side in sides:
                taken = side.accumulate()
                side.end()
                if turn >= WARM_UP:
                    found[name].append(taken)
        for _, side in sides:
            side.close()
    return found


def median(epochs: Sequence[Accumulated], field: str) -> float:
    """In ms."""
    return 1000.0 * float(statistics.median(getattr(epoch, field) for epoch in epochs))


def ratio(found: dict[str, list[Accumulated]], name: str) -> float:
    """Of a side's step to plain PyTorch's, in the same round: the median over the rounds."""
    pairs = zip(found[name], found["plain"], strict=True)
    return statistics.median(ours.seconds / plain.seconds for ours, plain in pairs)


NOTE = f"""\
Milliseconds per step: {BATCH} samples, {STEPS} steps an epoch, whose end is not timed. Medians over the epochs; *of
plain* is the median of the ratios within a round. All sides are in one process, so what `p2p` tells the C allocator (to
keep freed message buffers) holds for all. Both ways an element of the sum is read and written once in a step, and one
of the new gradient read: plain PyTorch does it right after that was written, while it may still be in a cache. The rest
of Shoal's step is the report to the swarm, a fixed time."""


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.3M", "6.3M", "10M", "25M"], help="parameters (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="epochs of each side that count (default: 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for accumulation.md and accumulation.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = environment() | {"threads": options.threads}
    rows: list[list[str]] = []
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    for size in options.models:
        found = measure(size, options.rounds)
        raw[size] = {name: [asdict(epoch) for epoch in epochs] for name, epochs in found.items()}
        for name, epochs in found.items():
            fields = [median(epochs, field) for field in ("passes", "calls", "seconds")]
            rows.append([f"{size}, {name}", *(number(field) for field in fields), number(ratio(found, name), 3)])
            if name != "plain":
                of_plain = f"{size}, {name}: a step, of plain PyTorch's"
                figures.append(Figure(of_plain, ratio(found, name), PROMISED.get(size, "<= 1")))
        print(f"{size}: done", file=sys.stderr, flush=True)
    head = ["model, side", "forward and backward ms", "step and zero_grad ms", "together ms", "of plain"]
    parts = ["# Gradient accumulation", describe(facts), table(head, rows), NOTE, figure_table(figures)]
    data = {
        "environment": facts,
        "seconds": raw,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    publish(options.out, "accumulation", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
