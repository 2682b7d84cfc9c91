"""What an Optimizer costs a process that has torch: seconds, threads, processes, memory, and what a SIGKILL leaves. And
how long 8 and 16 replicas take until they make a step together, and one that takes the place of a killed one.

    python -m benchmarks.startup --hivemind-python .venv-hivemind/bin/python

Each start is a new process; a plain torch optimizer, Shoal and hivemind take turns. When it is measured the trainer is
killed with SIGKILL, to count the processes that outlive it; those are then ended too. The replicas that start together
are forked from a process that has imported everything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import Worker, end_on_signals, pss_bytes, session_processes
from benchmarks.report import Figure, number

TIMEOUT = 60.0  # seconds for one start
SETTLE = 1.0  # seconds until memory is measured, so that what starts in the background is there
AFTERLIFE = 3.0  # seconds in which what belongs to a killed trainer may end by itself
CROWDS = [("synchronous", 8), ("DiLoCo", 8), ("synchronous", 16)]
CROWD_TIMEOUT = 90.0  # seconds for one start of all, or one restart
RESTARTS = 3  # of each crowd
RESULTS = Path(__file__).resolve().parent / "results"

Event = dict[str, Any]


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
    cpu: dict[str, float]  # CPU seconds of the parts; only of Shoal


def start_once(side: str, python: str, log: Path) -> Start:
    """Starts one trainer, measures it, kills it and ends what it leaves."""
    worker = Worker(python, "benchmarks.workers.start", [side], log)
    try:
        worker.receive(TIMEOUT)
        before = pss_bytes([worker.session])
        threads_before = sum(stat.threads for stat in session_processes(worker.session))
        made = worker.ask("make", TIMEOUT)
        time.sleep(SETTLE)
        after = pss_bytes([worker.session])
        stats = session_processes(worker.session)
        threads = sum(stat.threads for stat in stats)
        worker.kill()
        time.sleep(AFTERLIFE)
        left = len(session_processes(worker.session))
        extra = threads - threads_before, after, after - before
        return Start(made["seconds"], threads, len(stats), *extra, left, made["cpu"])
    finally:
        worker.stop(patience=0)


@dataclass(frozen=True)
class Crowd:
    """Replicas that were started together, and some that took the place of killed ones.

    Attributes:
        mode, count: as in CROWDS.
        began: when the first of them was forked.
        events: of all replicas, as `benchmarks.workers.start_crowd` tells them.
        restarts: for each, when a replica was killed, and the events of the one that took its place.
    """

    mode: str
    count: int
    began: float
    events: list[Event]
    restarts: list[tuple[float, list[Event]]]

    @property
    def seconds(self) -> float:
        """From the first fork to the first step that all made together."""
        return float(min(event["time"] for event in self._together) - self.began)

    @property
    def cpu(self) -> float:
        """CPU seconds of all replicas until then."""
        return float(sum(life[0]["cpu"] for life in by_replica(self._together).values()))

    @property
    def first_round(self) -> float:
        """How many times as long as a later round the first common round takes."""
        lives = by_replica(self._together).values()
        later = statistics.median(event["round"] for life in lives for event in life[1:])
        return float(statistics.median(life[0]["round"] for life in lives) / later)

    @property
    def restart_seconds(self) -> list[float]:
        """From each kill to the first step that counts samples of the new replica."""
        return [events[-1]["time"] - killed for killed, events in self.restarts]

    @property
    def _together(self) -> list[Event]:
        return [event for event in self.events if is_common(self.count, event)]


def by_replica(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each replica, in order."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event["replica"], []).append(event)
    return found


def crowd_once(mode: str, count: int, log: Path) -> Crowd:
    """Starts replicas, and restarts some."""
    worker = Worker(sys.executable, "benchmarks.workers.start_crowd", [mode, str(count)], log)
    try:
        started = worker.ask("start", CROWD_TIMEOUT)
        restarts = [worker.ask("restart", CROWD_TIMEOUT) for _ in range(RESTARTS)]
        pairs = [(restarted["began"], restarted["events"]) for restarted in restarts]
        return Crowd(mode, count, started["began"], started["events"], pairs)
    finally:
        worker.stop(patience=0)


def timeline(lives: Sequence[tuple[float, list[Event]]]) -> list[list[str]]:
    """The rows of a timeline: for each event the median of the seconds since the beginning, the latest, and the median
    of the CPU seconds since the event before. Each life has its beginning and its events until it is in a round."""
    times: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for began, events in lives:
        last = events[-1]
        ended = last["time"] - last["step"]
        moments = [(event["event"], event["time"]) for event in events[:-1]]
        moments += [("asks for a round", ended - last["round"]), ("round begins", ended - last["allreduce"])]
        for name, moment in [*moments, ("result is there", ended), ("step made", last["time"])]:
            times.setdefault(name, []).append(moment - began)
        for before, event in pairwise([{"cpu": 0.0}, *events]):
            name = "step made" if event is last else event["event"]
            costs.setdefault(name, []).append(event["cpu"] - before["cpu"])
    ordered = sorted(times, key=lambda name: statistics.median(times[name]))
    return [
        [
            name,
            number(statistics.median(times[name])),
            number(max(times[name])),
            number(report.median(costs.get(name, [])), 3),
        ]
        for name in ordered
    ]


def is_common(count: int, event: Event) -> bool:
    """Whether this is the end of an epoch of so many members."""
    return bool(event.get("peers") == count)


def counts_own(event: Event) -> bool:
    """Whether this is the end of an epoch that counts samples of the replica."""
    return bool(event.get("own", 0.0) > 0)


def until_epoch(events: list[Event], is_it: Callable[[Event], bool]) -> list[Event]:
    """The events up to the first epoch of that kind, without the epochs before it."""
    end = next(number for number, event in enumerate(events) if is_it(event))
    return [event for event in events[:end] if event["event"] != "epoch"] + [events[end]]


NOTE = f"""\
Medians. *torch*: `torch.optim.SGD` alone, which imports `torch._dynamo` when the first one is made; the others make it
too. *Seconds*: with the library's own import. *Extra*: beyond the same process with torch imported and no more.
PSS and threads are of the trainer and all that it started. *Left*: processes alive {AFTERLIFE:g} s after the kill."""

CROWD_NOTE = f"""\
Replicas that are forked from a process that has imported everything. Each has 10 micro-steps (in DiLoCo: inner steps)
of 0.1 s and a real forward and backward pass (1.1 million parameters, AdamW) in an epoch. Medians, and in brackets the
least. *First step*: from the first fork to the first step that all make together; of this, 1 s is for the micro-steps
of the first epoch. *CPU*: of all replicas until then. *First round*: how many times as long as a later one it takes.
*Restart*: from SIGKILL of a replica to the first step that counts samples of the one that takes its place, {RESTARTS}
in each repeat."""

TIMELINE_NOTE = """\
Seconds since the first fork or the kill, of the median and of the last replica; and CPU seconds of a replica since its
event before."""


def describe_crowds(crowds: Sequence[Crowd]) -> tuple[list[str], list[Figure]]:
    """The tables of replicas that start together, and what is promised of them."""
    rows, figures, texts = [], [], []
    for mode, count in CROWDS:
        those = [crowd for crowd in crowds if (crowd.mode, crowd.count) == (mode, count)]
        columns = [
            [crowd.seconds for crowd in those],
            [crowd.cpu for crowd in those],
            [crowd.first_round for crowd in those],
            [seconds for crowd in those for seconds in crowd.restart_seconds],
        ]
        shown = [f"{number(statistics.median(values))} ({number(min(values))})" for values in columns]
        rows.append([f"{count}, {mode}", *shown])
        start, _, ratio, restart = map(statistics.median, columns)
        named = f"{count} replicas, {mode}: "
        figures.append(Figure(f"{named}seconds to the first common step", start, "<= 4" if count <= 8 else "<= 7"))
        figures.append(Figure(f"{named}the first round, relative to later ones", ratio, "<= 2"))
        if count <= 8:
            figures.append(Figure(f"{named}seconds from a kill to a step with its successor", restart, "<= 2.5"))
        together = [
            (crowd.began, until_epoch(events, partial(is_common, count)))
            for crowd in those
            for events in by_replica(crowd.events).values()
        ]
        restarted = [(killed, until_epoch(events, counts_own)) for crowd in those for killed, events in crowd.restarts]
        for what, lives in (("start", together), ("restart", restarted)):
            head = [f"{what}: {count} replicas, {mode}", "median", "last", "CPU"]
            texts.append(report.table(head, timeline(lives)))
    head = ["replicas", "first step", "CPU", "first round", "restart"]
    return [report.table(head, rows), CROWD_NOTE, *texts, TIMELINE_NOTE], figures


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", metavar="PATH", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each library (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for startup.md and startup.json")
    options = parser.parse_args()
    end_on_signals()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed library has its byte code
    facts = report.environment()
    pythons = {"torch": sys.executable, "shoal": sys.executable} | (
        {"hivemind": options.hivemind_python} if options.hivemind_python else {}
    )
    starts: dict[str, list[Start]] = {side: [] for side in pythons}
    crowds: list[Crowd] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as logs:
        for repeat in range(options.repeats + 1):
            for side, python in pythons.items():
                measured = start_once(side, python, Path(logs) / f"{side}.log")
                if repeat:  # the first one compiles Python files and fills the page cache
                    starts[side].append(measured)
            if repeat:
                crowds += [crowd_once(mode, count, Path(logs) / "crowd.log") for mode, count in CROWDS]
    numbers = [field.name for field in fields(Start) if field.name != "cpu"]
    medians = {
        side: {name: statistics.median(getattr(start, name) for start in runs) for name in numbers}
        for side, runs in starts.items()
    }
    cpu = {part: statistics.median(start.cpu[part] for start in starts["shoal"]) for part in starts["shoal"][0].cpu}
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
    tables, promised = describe_crowds(crowds)
    promises = [
        Figure("seconds after torch is imported", ours["seconds"], "<= 1"),
        Figure("the same, less what torch.optim.SGD takes", ours["seconds"] - plain["seconds"], "<= 1"),
        Figure("CPU seconds to import DHT and Optimizer", cpu["import"], "<= 0.3"),
        Figure("CPU seconds of DHT(start=True)", cpu["DHT"], "<= 0.1"),
        Figure("CPU seconds of Optimizer(...)", cpu["Optimizer"], "<= 0.1"),
        Figure("extra PSS, MB", ours["extra_pss"] / 1e6, "<= 60"),
        Figure("the same, less what torch.optim.SGD takes", (ours["extra_pss"] - plain["extra_pss"]) / 1e6, "<= 60"),
        Figure("processes left after SIGKILL", ours["left_after_kill"], "<= 0"),
        *promised,
    ]
    text = "\n\n".join(
        [
            "# From torch imported to an Optimizer constructed, and to the first common step",
            report.describe(facts | {"repeats": options.repeats}),
            report.table(head, rows),
            NOTE,
            *tables,
            report.figure_table(promises),
        ]
    )
    data = {
        "environment": facts,
        "medians": medians,
        "cpu": cpu,
        "starts": {side: [asdict(start) for start in runs] for side, runs in starts.items()},
        "crowds": [asdict(crowd) for crowd in crowds],
        "promises": [asdict(promise) | {"met": promise.met} for promise in promises],
    }
    report.publish(options.out, "startup", text, data)


if __name__ == "__main__":
    main()
