"""What two peers do in one epoch, second by second, with Shoal and with hivemind: a picture.

    python -m benchmarks.timeline --hivemind-python .venv-hivemind/bin/python

Both train the same model in the synchronous mode with the same settings, one after the other. Computing is slept
through, so that what remains is what a library adds: when the trainer waits, when a group is gathered, when bytes move.
Needs matplotlib (the extra "demo"); without it only the figures are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import ROOT, end_on_signals
from benchmarks.workers.timeline import PEERS

RESULTS = Path(__file__).resolve().parent / "results"
PATIENCE = 15.0  # seconds for a peer to end by itself
COLOURS = {
    "compute": "#7fb069",
    "blocked": "#d1495b",
    "last step": "#d1495b",
    "matchmaking": "#edae49",
    "all-reduce": "#00798c",
    "all-reduce of the state": "#66a5ad",
}


@dataclass(frozen=True)
class Mark:
    """What was done from when to when, in seconds of the machine's clock."""

    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Recorded:
    """One library's run: the marks of each peer."""

    name: str
    peers: list[list[Mark]]

    def blocked(self) -> float:
        """How long a trainer was in `step` in an epoch, in seconds: the median of the epochs but the first, and of
        that the mean over the peers."""
        medians = []
        for marks in self.peers:
            epochs, total = [], 0.0
            for mark in marks:
                if mark.what in ("blocked", "last step"):
                    total += mark.end - mark.start
                if mark.what == "last step":
                    epochs.append(total)
                    total = 0.0
            medians.append(statistics.median(epochs[1:]))
        return statistics.mean(medians)

    def median(self, what: str) -> float | None:
        """Of what is marked so at the first peer, but for the first epoch's; None if nothing is."""
        found = [mark.end - mark.start for mark in self.peers[0] if mark.what == what][1:]
        return statistics.median(found) if found else None

    def one_epoch(self) -> tuple[float, float]:
        """From when to when the last whole epoch of the first peer went, with a little of what came after."""
        ends = [mark.end for mark in self.peers[0] if mark.what == "last step"]
        return ends[-3], ends[-2] + 0.15 * (ends[-2] - ends[-3])


def record(name: str, python: str, options: argparse.Namespace) -> Recorded:
    """Runs two peers of one library to their end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(PEERS)]
        arguments = [str(options.width), str(options.seconds), str(options.epochs)]
        processes = []
        for file in files:
            log = stack.enter_context(file.with_suffix(".log").open("w"))
            process = subprocess.Popen(
                [python, "-m", f"benchmarks.workers.timeline_{name}", str(file), *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            processes.append(process)
            stack.callback(end, process)
        timer = threading.Timer(options.timeout, kill, [processes])
        timer.start()
        stack.callback(timer.cancel)
        addresses: list[Any] = []
        for process in processes:
            tell(process, addresses)
            addresses = addresses or hear(process, name)
            if process is not processes[0]:
                hear(process, name)
        for process in processes:
            tell(process, "train")
        for process in processes:
            hear(process, name)
        marks = [[Mark(**json.loads(line)) for line in file.read_text().splitlines()] for file in files]
        return Recorded(name, [sorted(found, key=lambda mark: mark.end) for found in marks])


def kill(processes: list[subprocess.Popen[str]]) -> None:
    """What reads from them is told that they ended."""
    for process in processes:
        process.kill()


def tell(process: subprocess.Popen[str], message: Any) -> None:
    """One line of JSON to a peer."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], name: str) -> Any:
    """One line of JSON from a peer. Raises RuntimeError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a peer of {name} ended, or did not end in time")
    return json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    """End a peer and all that it started."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def draw(runs: list[Recorded], path: Path) -> None:
    """One row for each trainer and one for each network, on one scale of seconds for all libraries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    longest = max(stop - start for start, stop in (run.one_epoch() for run in runs))
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(11, 2.1 * len(runs) + 0.9), squeeze=False)
    for axis, run in zip(axes[:, 0], runs, strict=True):
        start, stop = run.one_epoch()
        for rank, marks in enumerate(run.peers):
            for mark in marks:
                if mark.end < start or mark.start > stop or mark.what not in COLOURS:
                    continue
                row = 2 * rank + (mark.what not in ("compute", "blocked", "last step"))
                left, right = max(mark.start, start), min(mark.end, stop)
                axis.barh(row, right - left, left=left - start, height=0.7, color=COLOURS[mark.what])
        axis.set_yticks(range(2 * PEERS), [f"peer {rank}, {what}" for rank in range(PEERS) for what in ROWS])
        axis.invert_yaxis()
        axis.set_xlim(0, longest)
        axis.set_title(f"{run.name}: blocked {run.blocked():.2f} s an epoch", loc="left")
    axes[-1, 0].set_xlabel("seconds")
    names = {"last step": None, "blocked": "trainer in step"}
    handles = [
        Patch(color=colour, label=names.get(what, what) or what)
        for what, colour in COLOURS.items()
        if what not in names or names[what]
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


ROWS = ("trainer", "network")


def main() -> None:
    """Records, prints the medians, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", help="a Python that has hivemind; without it only Shoal is shown")
    parser.add_argument("--width", type=int, default=1024, help="of the MLP: 1024 makes 2.1 million parameters")
    parser.add_argument("--seconds", type=float, default=3.0, help="of computing in an epoch")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one library's run")
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    runs = [record("shoal", sys.executable, options)]
    if options.hivemind_python:
        runs.append(record("hivemind", options.hivemind_python, options))
    lines = [
        "# One epoch of two peers",
        "",
        f"{options.seconds:g} s of computing in an epoch, an MLP of width {options.width}, the synchronous mode, "
        f"medians of {options.epochs - 1} epochs; load average at the start {facts['load_average_at_start']}.",
        "",
        "| | in `step`, an epoch, s | matchmaking, s | BEGIN to first chunk, s | all-reduce, s |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [run.median(what) for what in ("matchmaking", "first chunk", "all-reduce")]
        shown = ["not told" if cell is None else f"{cell:.4f}" for cell in cells]
        lines.append(f"| {run.name} | {run.blocked():.3f} | {' | '.join(shown)} |")
    RESULTS.mkdir(exist_ok=True)
    text = "\n".join(lines) + "\n\n![what two peers do in one epoch](timeline.png)\n"
    print(text)
    (RESULTS / "timeline.md").write_text(text)
    try:
        draw(runs, RESULTS / "timeline")
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
