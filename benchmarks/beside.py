"""Whether Shoal got slower: CPU seconds beside another commit's, of rounds, matchmaking, a kill, a step and the demo.

    python -m benchmarks.beside ../before [--turns 40] [--demos 40]

Both sides take turns, and who begins changes from turn to turn. What is compared is the CPU time of the whole process,
which hangs less on what else the machine does than seconds do. Seconds are in the results, too.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, Worker, checkout, end_on_signals, tree_with
from benchmarks.report import Figure, describe, environment, figure_table, median, number, publish, table

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = {
    "round_1m": "4 rounds of 1 million float32, 4 peers",
    "round_25m": "a round of 25 million float32, 4 peers",
    "matchmaking": "10 rounds of 1,000 float32, 2 peers",
    "kill": "a round of 6 million float32, 3 peers and one that is killed",
    "accumulate": "10 steps that accumulate 6.3 million gradients, without forward and backward passes",
    "rest": "10 s at rest, 4 peers",
}
DEMO = ("demo", "--peers", "2", "--epochs", "10", "--no-kill")
WARM_UP = 3  # turns of new processes that are not counted
TURNS = 10  # of the same two processes: of one code, one process needs up to 4 % more than another
TIMEOUT = 120.0  # seconds for a turn
BOUND = "<= 1.05"

NOTE = """\
CPU seconds of user and system, of all threads; *ratio* is the median of the ratios of two turns in a row, one of each
side. The peers of a side are in one process, which is a new one every 10 turns. The one that is killed has a process of
its own, which is not counted. The demo's peers are processes, and most of their time is the start of Python and torch.
*Bytes*: what the peers have sent over their links, which carry all but the chunks of tensors."""


def demo(tree: Path, folder: Path) -> dict[str, float]:
    """CPU seconds, and seconds, of a short demo with the Shoal of a tree, with all its processes."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    cpu, started = spent(), time.monotonic()
    command = [sys.executable, "-m", "shoal", *DEMO, "--out", str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=TIMEOUT)
    return {"cpu": spent() - cpu, "seconds": time.monotonic() - started}


def ratios(found: dict[str, list[dict[str, float]]], field: str) -> list[float]:
    """Of now to before, turn by turn."""
    return [now[field] / before[field] for now, before in zip(found["now"], found["before"], strict=True)]


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=checkout, help="a worktree of another commit")
    parser.add_argument("--turns", type=int, default=40, help="that count, of each side (default: 40)")
    parser.add_argument("--demos", type=int, default=40, help="of each side (default: 40)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for beside.md and beside.json")
    options = parser.parse_args()
    end_on_signals()
    facts = environment() | {"before": options.before.name}
    found: dict[str, dict[str, list[dict[str, float]]]]
    with tempfile.TemporaryDirectory(prefix="shoal-beside-") as temporary:
        folder = Path(temporary)
        trees = {"now": ROOT, "before": tree_with(options.before, folder)}
        order = list(trees)
        found = {command: {name: [] for name in order} for command in MEASURED}
        for first in range(0, options.turns, TURNS):
            log = folder / f"workers-{first}"
            log.mkdir()
            workers = {
                name: Worker(sys.executable, "benchmarks.workers.beside", [], log / name, tree)
                for name, tree in trees.items()
            }
            try:
                for command in MEASURED:
                    for turn in range(WARM_UP + min(TURNS, options.turns - first)):
                        order.reverse()
                        for name in order:
                            result = workers[name].ask(command, TIMEOUT)
                            if turn >= WARM_UP:
                                found[command][name].append(result)
            finally:
                for worker in workers.values():
                    worker.stop(10)
            print(f"{min(first + TURNS, options.turns)} turns: done", file=sys.stderr, flush=True)
        found["demo"] = {name: [] for name in order}
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # a run that is cut short tells what it has measured
            for turn in range(options.demos):
                order.reverse()
                both = {name: demo(trees[name], folder / f"demo-{turn}-{name}") for name in order}
                for name, result in both.items():
                    found["demo"][name].append(result)
    rows: list[list[str]] = []
    figures: list[Figure] = []
    for key, label in (MEASURED | {"demo": " ".join(("shoal", *DEMO))}).items():
        if not found[key]["now"]:
            continue
        cpu = {name: 1000 * statistics.median(one["cpu"] for one in found[key][name]) for name in order}
        of_cpu, of_seconds = (statistics.median(ratios(found[key], field)) for field in ("cpu", "seconds"))
        row = [label, number(cpu["now"], 1), number(cpu["before"], 1), number(of_cpu, 3), number(of_seconds, 3)]
        figures.append(Figure(f"CPU of {label}, of before", of_cpu, BOUND))
        sent = {name: median(one.get("bytes") for one in found[key][name]) for name in order}
        rows.append([*row, number(sent["now"], 0), number(sent["before"], 0)])
        if sent["now"] and sent["before"]:
            figures.append(Figure(f"bytes of {label}, of before", sent["now"] / sent["before"], BOUND))
    head = ["what", "CPU ms now", "CPU ms before", "ratio of CPU", "ratio of seconds", "bytes now", "bytes before"]
    parts = ["# Now beside before", describe(facts), table(head, rows), NOTE, figure_table(figures)]
    data: dict[str, Any] = {
        "environment": facts,
        "turns": found,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    publish(options.out, "beside", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
