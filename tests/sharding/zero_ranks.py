"""Run checks on real ranks: python -m tests.sharding.zero_ranks RANK RANKS FOLDER MODULE[:CHECK]…

Starting a process costs seconds, so all checks of one number of ranks share the processes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]

Outcome = dict[str, str | None]
"""By check: None where it passed, else the traceback."""


def start(ranks: int, folder: Path, modules: list[str], timeout: float = 60.0) -> list[subprocess.Popen[str]]:
    """One process per rank; their output is captured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PG_TIMEOUT": str(timeout)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.zero_ranks", str(rank), str(ranks), str(folder), *modules],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def outcomes(processes: list[subprocess.Popen[str]], folder: Path, timeout: float = 400.0) -> list[Outcome | str]:
    """What each rank wrote, or the output of a rank that wrote nothing."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results: list[Outcome | str] = []
    for rank, output in enumerate(outputs):
        path = folder / f"{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else output)
    return results


def checks_of(module: str) -> list[str]:
    """The names of a module's checks, in their order."""
    lines = (ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines()
    return [line.removeprefix("def ").split("(")[0] for line in lines if line.startswith("def check_")]


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    done: Outcome = {}
    for name in sys.argv[4:]:
        name, _, only = name.partition(":")
        module = importlib.import_module(name)
        for check in [only] if only else checks_of(name):
            # A group of its own for each, so that what fails leaves the next alone.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{check}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=float(os.environ["PG_TIMEOUT"])),
            )
            try:
                getattr(module, check)()
                done[check] = None
            except Exception:  # noqa: BLE001 (told to the test, which shows it)
                done[check] = traceback.format_exc()
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
