"""What it costs that whatever users write into a model is noticed: CPU seconds of a step, beside another checkout.

    python -m benchmarks.written ../before          # a worktree of the commit to compare with

Each turn is a new process of each side; the order changes from turn to turn. Nobody writes: this is the price of
looking. One peer alone, without forward and backward passes; ZeRO in one process, with float32 copies of bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ELEMENTS = 6_300_000
LIMITS = {
    "default, SGD": 1.02,
    "offload_optimizer, AdamW": 1.02,
    "delay_optimizer_step, SGD": 1.07,
    "delay_optimizer_step, AdamW": 1.07,
    "delay_grad_averaging, AdamW": 1.07,
    "DiLoCo with offload, an inner step": 1.3,
    "ZeRO master weights, SGD, 64 of 1k": 1.3,
    "ZeRO master weights, AdamW, 16 of 250k": 1.3,
    "ZeRO master weights, SGD, 1 of 4M": 1.3,
}


def cpu_ms(step: Callable[[], object], repeats: int) -> float:
    """The median CPU time of the whole process for a call, in ms."""
    step()
    step()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    return statistics.median(taken) * 1e3


def measure() -> dict[str, float]:
    """CPU ms of each step, with the shoal that this process imports."""
    import torch
    import torch.distributed as dist

    import shoal

    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    found = {}
    with shoal.DHT(start=True) as dht:
        for name in LIMITS:
            mode, _, rest = name.partition(", ")
            if mode.startswith("ZeRO"):
                continue
            kind = kinds.get(rest, torch.optim.SGD)
            given: dict[str, Any] = {"target_batch_size": 4}
            if mode.startswith("DiLoCo"):
                given = {"outer": shoal.DiLoCo(inner_steps=10**6), "offload_optimizer": True}
            elif mode != "default":
                given |= {mode: True}
            parameters = [torch.nn.Parameter(torch.randn(ELEMENTS // 9)) for _ in range(9)]
            optimizer = shoal.Optimizer(
                dht=dht,
                run_id=name,
                params=parameters,
                batch_size_per_step=4,
                optimizer=functools.partial(kind, lr=1e-4),
                **given,
            )
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)

            def step(optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.state_dict() if optimizer.outer_optimizer is None else None  # ends what is under way

            found[name] = cpu_ms(step, 9)
            optimizer.shutdown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in LIMITS:
        if name.startswith("ZeRO"):
            _, rule, size = name.split(", ")
            count, elements = {"64 of 1k": (64, 1024), "16 of 250k": (16, 250_000), "1 of 4M": (1, 4_000_000)}[size]
            parameters = [torch.nn.Parameter(torch.randn(elements).bfloat16()) for _ in range(count)]
            zero = shoal.ZeroRedundancyOptimizer(parameters, kinds[rule], lr=1e-4, master_weights=True)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            found[name] = cpu_ms(zero.step, 15)
    dist.destroy_process_group()
    return found


def main() -> None:
    """Compare, and print the medians of the ratios."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("before", nargs="?", type=Path)
    arguments.add_argument("--turns", type=int, default=8)
    given = arguments.parse_args()
    if given.before is None:
        print(json.dumps(measure()))
        return
    now = Path(__file__).resolve().parents[1]
    ratios: dict[str, list[float]] = {name: [] for name in LIMITS}
    for turn in range(given.turns):
        seen = {}
        for side in (now, given.before.resolve())[:: 1 if turn % 2 else -1]:
            environment = {**os.environ, "PYTHONPATH": str(side), "OMP_NUM_THREADS": "1"}
            ran = subprocess.run(
                [sys.executable, __file__], env=environment, check=True, capture_output=True, text=True
            )
            seen[side] = json.loads(ran.stdout.splitlines()[-1])
        for name, found in ratios.items():
            found.append(seen[now][name] / seen[given.before.resolve()][name])
    for name, found in ratios.items():
        spread = f"from {min(found):.2f} to {max(found):.2f}"
        print(f"{name:40} {statistics.median(found):6.3f} of before, {spread}; limit {LIMITS[name]}")


if __name__ == "__main__":
    main()
