"""What an Optimizer costs a process that has torch: seconds, threads, processes, memory, and what a SIGKILL leaves.

    python -m benchmarks.startup --hivemind-python .venv-hivemind/bin/python

Each start is a new process; a plain torch optimizer, Shoal and hivemind take turns. When it is measured the trainer is
killed with SIGKILL, to count the processes that outlive it; those are then ended too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks import report
from benchmarks.processes import Worker, end_on_signals, pss_bytes, session_processes
from benchmarks.report import Figure, number

TIMEOUT = 60.0  # seconds for one start
SETTLE = 1.0  # seconds until memory is measured, so that what starts in the background is there
AFTERLIFE = 3.0  # seconds in which what belongs to a killed trainer may end by itself
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Start:
    """One start. Memory in bytes, of the trainer and all that it started."""

    seconds: float  # from torch imported to the optimizer constructed, with the library's own import
    threads: int
    processes: int
    extra_threads: int  # beyond what torch alone has
    pss: int
    extra_pss: int  # beyond the same process with torch alone
    left_after_kill: int  # processes that outlive the trainer's SIGKILL


def start_once(side: str, python: str, log: Path) -> Start:
    """Starts one trainer, measures it, kills it and ends what it leaves."""
    worker = Worker(python, "benchmarks.workers.start", [side], log)
    try:
        worker.receive(TIMEOUT)
        before = pss_bytes([worker.session])
        threads_before = sum(stat.threads for stat in session_processes(worker.session))
        seconds = worker.ask("make", TIMEOUT)
        time.sleep(SETTLE)
        after = pss_bytes([worker.session])
        stats = session_processes(worker.session)
        threads = sum(stat.threads for stat in stats)
        worker.kill()
        time.sleep(AFTERLIFE)
        left = len(session_processes(worker.session))
        return Start(seconds, threads, len(stats), threads - threads_before, after, after - before, left)
    finally:
        worker.stop(patience=0)


NOTE = f"""\
Medians. *torch*: `torch.optim.SGD` alone, which imports `torch._dynamo` when the first one is made; the others make it
too. *Seconds*: with the library's own import. *Extra*: beyond the same process with torch imported and no more.
PSS and threads are of the trainer and all that it started. *Left*: processes alive {AFTERLIFE:g} s after the kill."""


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", metavar="PATH", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each library (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for startup.md and startup.json")
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    pythons = {"torch": sys.executable, "shoal": sys.executable} | (
        {"hivemind": options.hivemind_python} if options.hivemind_python else {}
    )
    starts: dict[str, list[Start]] = {side: [] for side in pythons}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as logs:
        for repeat in range(options.repeats + 1):
            for side, python in pythons.items():
                measured = start_once(side, python, Path(logs) / f"{side}.log")
                if repeat:  # the first one compiles Python files and fills the page cache
                    starts[side].append(measured)
    medians = {
        side: {field.name: statistics.median(getattr(start, field.name) for start in runs) for field in fields(Start)}
        for side, runs in starts.items()
    }
    rows = [
        [
            side,
            number(m["seconds"]),
            number(m["processes"], 0),
            number(m["threads"], 0),
            number(m["extra_threads"], 0),
            number(m["pss"] / 1e6, 0),
            number(m["extra_pss"] / 1e6, 0),
            number(m["left_after_kill"], 0),
        ]
        for side, m in medians.items()
    ]
    head = ["library", "seconds", "processes", "threads", "extra threads", "PSS MB", "extra PSS MB", "left after kill"]
    ours, plain = medians["shoal"], medians["torch"]
    promises = [
        Figure("seconds after torch is imported", ours["seconds"], "<= 1"),
        Figure("the same, less what torch.optim.SGD takes", ours["seconds"] - plain["seconds"], "<= 1"),
        Figure("extra PSS, MB", ours["extra_pss"] / 1e6, "<= 60"),
        Figure("the same, less what torch.optim.SGD takes", (ours["extra_pss"] - plain["extra_pss"]) / 1e6, "<= 60"),
        Figure("processes left after SIGKILL", ours["left_after_kill"], "<= 0"),
    ]
    text = "\n\n".join(
        [
            "# From torch imported to an Optimizer constructed",
            report.describe(facts | {"repeats": options.repeats}),
            report.table(head, rows),
            NOTE,
            report.figure_table(promises),
        ]
    )
    data = {
        "environment": facts,
        "medians": medians,
        "starts": {side: [asdict(start) for start in runs] for side, runs in starts.items()},
        "promises": [asdict(promise) | {"met": promise.met} for promise in promises],
    }
    report.publish(options.out, "startup", text, data)


if __name__ == "__main__":
    main()
