"""Optimizer steps per second of a parameter server: 1, 2 and 4 threads, each with parameters of its own.

A worker that serves several trainers steps their optimizers from the threads of its RPC server. What then counts is how
much of a step needs the GIL. Each thread here has 100 parameters of 10,000 (or 1,000) float32 with gradients, and makes
Adam steps as fast as it can. The sides:

- loop, foreach, fused: `torch.optim.Adam` with that implementation;
- scripted: torch's own `DistributedOptimizer` on a worker, which runs its functional Adam in TorchScript;
- Shoal, worker: `shoal.remote.worker.WorkerOptimizer.apply`, the whole step of a worker but for asking the autograd
  context for gradients: 100 parameters and 100 gradients, each where it is;
- Shoal, flat: `shoal.functional.Adam` on flat memory, where parameters and gradients are one tensor each;
- kernel, flat: nothing but torch's fused kernel, on one flat tensor in place of the 100. It is not an optimizer: it is
  how fast the memory can be updated if a call costs nothing.

    python -m benchmarks.parameter_server [--repeats 7] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from shoal.functional import Adam, functional_optim_map
from shoal.remote.worker import Recipe, WorkerOptimizer

TENSORS, SIZES, THREADS = 100, (10_000, 1_000), (1, 2, 4)
LR = 1e-3

Step = Callable[[], Any]
Make = Callable[[list[Tensor], list[Tensor]], Step]


def torch_adam(**implementation: Any) -> Make:
    """A side that is a torch.optim optimizer."""

    def make(params: list[Tensor], grads: list[Tensor]) -> Step:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return torch.optim.Adam(params, lr=LR, **implementation).step

    return make


class Scripted(nn.Module):
    """What torch's `_ScriptLocalOptimizer` is, given the gradients instead of a context."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self, grads: list[Tensor | None]) -> None:
        """One step."""
        self.optimizer.step(grads)


def scripted(params: list[Tensor], grads: list[Tensor]) -> Step:
    """torch's functional Adam in TorchScript."""
    from torch.distributed.optim.functional_adam import _FunctionalAdam

    module = torch.jit.script(Scripted(_FunctionalAdam(params, lr=LR)))
    return lambda: module(grads)


def worker(params: list[Tensor], grads: list[Tensor]) -> Step:
    """What a worker runs."""
    adam = torch.optim.Adam
    optimizer = WorkerOptimizer(Recipe(adam, functional_optim_map[adam], (), {"lr": LR}))
    _, options = optimizer.add_group(0, params, {})
    return lambda: optimizer.apply({0: list(grads)}, {0: options})


def flat(params: list[Tensor], grads: list[Tensor]) -> Step:
    """The functional optimizer on flat memory."""
    param, grad = [torch.cat(params)], [torch.cat(grads)]
    adam = Adam(lr=LR)
    state = adam.init(param)
    return lambda: adam.step(param, grad, state)


def kernel(params: list[Tensor], grads: list[Tensor]) -> Step:
    """The fused kernel on flat memory, and nothing else."""
    param, grad = torch.cat(params), torch.cat(grads)
    mean, square, count = torch.zeros_like(param), torch.zeros_like(param), torch.ones(())

    def step() -> None:
        torch._fused_adam_(
            [param],
            [grad],
            [mean],
            [square],
            [],
            [count],
            lr=LR,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step


SIDES: dict[str, Make] = {
    "loop": torch_adam(foreach=False, fused=False),
    "foreach": torch_adam(foreach=True),
    "fused": torch_adam(fused=True),
    "scripted": scripted,
    "Shoal, worker": worker,
    "Shoal, flat": flat,
    "kernel, flat": kernel,
}


def prepared(make: Make, size: int) -> Step:
    """A step with its own parameters, past what only its first runs do."""
    step = make([torch.randn(size) for _ in range(TENSORS)], [torch.randn(size) for _ in range(TENSORS)])
    for _ in range(5):
        step()
    return step


def rate(steps: list[Step], seconds: float) -> float:
    """Steps per second of all threads together, one thread for each of these."""
    barrier = threading.Barrier(len(steps))
    rates = [0.0] * len(steps)

    def run(index: int) -> None:
        step, count = steps[index], 0
        step()  # what has not run for a while is no longer in the cache, or not even in memory
        barrier.wait()
        start = now = time.perf_counter()
        while now < start + seconds:
            step()
            count += 1
            now = time.perf_counter()
        rates[index] = count / (now - start)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def measure(repeats: int, seconds: float) -> dict[int, dict[str, dict[int, list[float]]]]:
    """Steps per second: size, side, number of threads, repeat. The sides take turns in every repeat."""
    rates: dict[int, dict[str, dict[int, list[float]]]] = {}
    for size in SIZES:
        steps = {side: [prepared(make, size) for _ in range(max(THREADS))] for side, make in SIDES.items()}
        rates[size] = {side: {threads: [] for threads in THREADS} for side in SIDES}
        for repeat in range(repeats):
            for side in SIDES:
                for threads in THREADS:
                    rates[size][side][threads].append(rate(steps[side][:threads], seconds))
            print(f"{TENSORS} x {size}: repeat {repeat + 1} of {repeats}", flush=True)
    return rates


def figures(medians: dict[int, dict[str, dict[int, float]]]) -> list[Figure]:
    """What issue 3 expects."""
    found = []
    for size, sides in medians.items():
        theirs = sides["scripted"]
        for name in ("Shoal, worker", "Shoal, flat"):
            ours = sides[name]
            found.append(Figure(f"{TENSORS} x {size}: {name}, 2 threads over 1 thread", ours[2] / ours[1], ">= 1.8"))
            found.append(Figure(f"{TENSORS} x {size}: {name}, over scripted, 2 threads", ours[2] / theirs[2], ">= 4"))
    return found


def main() -> None:
    """Measures, prints, and writes results/parameter_server.md and .json."""
    parser = argparse.ArgumentParser(description="Optimizer steps per second of a parameter server.")
    parser.add_argument("--repeats", type=int, default=7, help="how often each figure is measured")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the server's threads fill the cores already
    machine = environment()
    rates = measure(arguments.repeats, arguments.seconds)
    medians = {
        size: {side: {n: statistics.median(values) for n, values in of.items()} for side, of in sides.items()}
        for size, sides in rates.items()
    }
    found = figures(medians)
    parts = [
        "# Optimizer steps of a parameter server",
        f"{describe(machine)}. Adam, float32, `torch.set_num_threads(1)`; each thread steps {TENSORS} tensors of its "
        f"own; medians of {arguments.repeats} times {arguments.seconds} s, the sides in turn. `python -m "
        "benchmarks.parameter_server` makes this again.",
        figure_table(found),
    ]
    for size, sides in medians.items():
        head = ["side", *(f"{n} thread{'s' * (n > 1)}" for n in THREADS), "2 over 1"]
        rows = [[side, *(number(of[n], 0) for n in THREADS), number(of[2] / of[1])] for side, of in sides.items()]
        parts += [f"## {TENSORS} x {size}, steps per second", table(head, rows)]
    data = {"environment": machine, "rates": rates, "figures": {f.name: f.value for f in found}}
    publish(arguments.out, "parameter_server", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
