"""Measures in a process of its own what an Optimizer costs to make, says so as a JSON line, and waits to be killed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

before_torch = time.process_time()
import torch  # noqa: E402

TORCH_SECONDS = time.process_time() - before_torch


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def children() -> list[str]:
    return [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]


def memory() -> float:
    """What this process alone takes, shared memory divided among its users, in MB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell")


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(10, 10)
    model(torch.zeros(1, 10)).sum().backward()
    local = torch.optim.AdamW(model.parameters(), lr=0.1)
    local.step()
    before_threads, before_memory, before_modules = threads(), memory(), set(sys.modules)
    before_named = set(threading.enumerate())
    started_cpu = time.process_time()

    import shoal

    _ = shoal.DHT, shoal.Optimizer
    imported_cpu = time.process_time()
    dht = shoal.DHT(start=True)
    made_dht_cpu = time.process_time()
    optimizer = shoal.Optimizer(dht=dht, run_id="start", target_batch_size=8, params=None, optimizer=local)
    made_cpu = time.process_time()
    model(torch.zeros(8, 10)).sum().backward()
    optimizer.step(batch_size=8)
    result = {
        "epoch": optimizer.local_epoch,
        "import_cpu": (imported_cpu - started_cpu) / TORCH_SECONDS,
        "dht_cpu": (made_dht_cpu - imported_cpu) / TORCH_SECONDS,
        "optimizer_cpu": (made_cpu - made_dht_cpu) / TORCH_SECONDS,
        "imports": sorted({name.split(".")[0] for name in set(sys.modules) - before_modules}),
        "of_torch": sorted(name for name in set(sys.modules) - before_modules if name.startswith("torch.")),
        "memory": memory() - before_memory,
        "threads": threads() - before_threads,
        "python_threads": sorted(t.name for t in set(threading.enumerate()) - before_named),
        "children": children(),
        "address": str(dht.get_visible_maddrs()[-1]),
    }
    if "--stop" in sys.argv:
        optimizer.shutdown()
        dht.shutdown()
        deadline = time.monotonic() + 2
        while threads() > before_threads and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel's side of a thread that was joined ends a moment later
        result["left"] = {
            "threads": threads() - before_threads,
            "python_threads": sorted(t.name for t in set(threading.enumerate()) - before_named),
        }
    print(json.dumps(result), flush=True)
    if "--stop" not in sys.argv:
        time.sleep(600)


main()
