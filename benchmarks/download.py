"""Downloads a state of 400 MB from one donor: Shoal, Shoal of before, and sealed sockets one way, in turn in one run.

    python -m benchmarks.download --before ../before

The state is one tensor of float32 of a `DecentralizedAverager`, of which a donor takes a new copy for every download.
Then a donor trains a model whose state is as large, while a newcomer downloads it 10 times in a row: what the donor's
steps cost it, beside steps without. The digests alone: BLAKE3 of as many bytes in one thread, in chunks of 1 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from benchmarks import report
from benchmarks.processes import ROOT, Worker, WorkerError, add_before, cpu_seconds, end_on_signals, tree_with
from benchmarks.report import Figure, median, number, paired
from benchmarks.sealed import CHUNK
from benchmarks.workers.link import bytes_of

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT = 120.0
LEAD = 0.1  # seconds between the command and the moment at which both begin
DOWNLOADS = 10  # in a row
ALONE_SECONDS = 10.0  # in which steps without downloads are counted, before and after
LOADED = ("own", "process", "seconds")

Pair = list[Worker]  # the donor, the newcomer


@contextlib.contextmanager
def pair(module: str, arguments: list[str], logs: Path, tree: Path = ROOT) -> Iterator[Pair]:
    """A donor and a newcomer, who know each other."""
    with contextlib.ExitStack() as stack:
        workers: Pair = []
        for rank in range(2):
            log = logs / f"{tree.name}-{module}-{rank}.log"
            workers.append(Worker(sys.executable, module, [str(rank), *arguments], log, tree))
            stack.callback(workers[-1].stop, 5.0)
        addresses = [workers[0].ask("open", TIMEOUT, initial_peers=[])]
        addresses.append(workers[1].ask("open", TIMEOUT, initial_peers=addresses[0]))
        if "sealed" in module:
            for worker in workers:
                worker.send("connect", addresses=addresses)
            for worker in workers:
                worker.receive(TIMEOUT)
        yield workers


def download(workers: Pair, is_sealed: bool) -> dict[str, float]:
    """One download: its seconds, and CPU seconds of the donor and of both."""
    sessions = [worker.session for worker in workers]
    if is_sealed:
        for worker in workers:
            worker.ask("fill", TIMEOUT)
    before = [cpu_seconds([session]) for session in sessions]
    if is_sealed:
        at = time.monotonic() + LEAD
        for worker in workers:
            worker.send("round", at=at, busy=False)
        answers = [worker.receive(TIMEOUT) for worker in workers]
        seconds = max(answer["finished"] for answer in answers) - at
    else:
        seconds = workers[1].ask("load", TIMEOUT)
    spent = [cpu_seconds([session]) - start for session, start in zip(sessions, before, strict=True)]
    if workers[1].ask("error", TIMEOUT, size=1) > 0:
        raise WorkerError(f"{workers[1].name}: what came is not what the donor has")
    return {"seconds": seconds, "donor_cpu": spent[0], "cpu": sum(spent)}


def digest_seconds(vector: torch.Tensor) -> float:
    """BLAKE3 of the vector's chunks, in one thread."""
    memory = bytes_of(vector)
    started = time.monotonic()
    for start in range(0, len(memory), 4 * CHUNK):
        blake3(memory[start : start + 4 * CHUNK]).digest()
    return time.monotonic() - started


def time_downloads(sides: dict[str, Path], elements: int, rounds: int, logs: Path) -> dict[str, list[dict[str, float]]]:
    """Downloads of each side, and the digests alone, in turn; one of each before is not counted."""
    vector = torch.randn(elements)
    measured: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        pairs = {
            side: stack.enter_context(pair("benchmarks.workers.download_peer", [str(elements)], logs, tree))
            for side, tree in sides.items()
        }
        arguments = [str(elements), str(CHUNK), "one-way"]
        pairs["sealed"] = stack.enter_context(pair("benchmarks.workers.sealed_averager", arguments, logs))
        for index in range(rounds + 1):
            turns = {side: download(workers, side == "sealed") for side, workers in pairs.items()}
            turns["digests"] = {"seconds": digest_seconds(vector)}
            told = ", ".join(f"{side} {turn['seconds']:.3f} s" for side, turn in turns.items())
            say(f"download {index} of {rounds}: {told}")
            for side, turn in turns.items() if index else ():
                measured.setdefault(side, []).append(turn)
    return measured


def time_steps(tree: Path, logs: Path) -> dict[str, Any]:
    """A donor's steps with and without downloads, and the seconds of each of the downloads."""
    with pair("benchmarks.workers.download_peer", ["1"], logs, tree) as (donor, newcomer):
        for worker in (donor, newcomer):
            worker.ask("begin", TIMEOUT)
        donor.ask("train", TIMEOUT)
        time.sleep(ALONE_SECONDS)
        loads = newcomer.ask("load_often", 10 * TIMEOUT, times=DOWNLOADS)
        time.sleep(ALONE_SECONDS)
        steps = donor.ask("stop", TIMEOUT)[1:]  # the first is a warm-up
    during = [s for s in steps if s["at"] < loads["ended"] and s["at"] + s["seconds"] > loads["begun"]]
    without = [s for s in steps if s not in during]
    rows = {
        name: {what: sum(step[what] for step in kind) / len(kind) for what in LOADED} | {"steps": len(kind)}
        for name, kind in (("during", during), ("without", without))
    }
    return {"downloads": loads["seconds"], **rows}


def say(progress: str) -> None:
    """Progress, apart from the report."""
    print(progress, file=sys.stderr, flush=True)


def download_table(measured: dict[str, list[dict[str, float]]]) -> str:
    """What a download takes."""
    rows = []
    for side, turns in measured.items():
        seconds = [turn["seconds"] for turn in turns]
        cpu = [number(median(turn.get(what) for turn in turns)) for what in ("donor_cpu", "cpu")]
        rows.append([side, number(median(seconds), 3), f"{min(seconds):.3f} - {max(seconds):.3f}", *cpu])
    return report.table(["side", "seconds", "least - most", "donor's CPU s", "CPU s of both"], rows)


def step_table(steps: dict[str, dict[str, Any]]) -> str:
    """What downloads cost their donor."""
    head = ["side: steps", "count", "CPU s a step, its thread", "CPU s a step, the process", "seconds a step"]
    rows = [
        [f"{side}: {name}", str(found[name]["steps"]), *(number(found[name][what], 3) for what in LOADED)]
        for side, found in steps.items()
        for name in ("without", "during")
    ]
    return report.table(head, rows)


def compare(measured: dict[str, list[dict[str, float]]], steps: dict[str, dict[str, Any]]) -> list[Figure]:
    """What is promised, as medians of the ratios of downloads side by side."""
    seconds = {side: [turn["seconds"] for turn in turns] for side, turns in measured.items()}
    allowed = [3 * s + d for s, d in zip(seconds["sealed"], seconds["digests"], strict=True)]
    found = [
        ("download, Shoal / (3 x sealed sockets + the digests)", paired(seconds["shoal"], allowed), "<= 1"),
        ("download, Shoal / sealed sockets", paired(seconds["shoal"], seconds["sealed"]), ""),
    ]
    if "before" in seconds:
        found.append(("download, Shoal before / Shoal", paired(seconds["before"], seconds["shoal"]), ">= 4"))
    for side, of in steps.items():
        for what, name in zip(LOADED, ("CPU of its thread", "CPU of the process", "seconds"), strict=True):
            bound = "<= 1.1" if side == "shoal" and what == "own" else ""
            ratio = of["during"][what] / of["without"][what]
            found.append((f"donor's step during {DOWNLOADS} downloads / without, {name}, {side}", ratio, bound))
    return [Figure(name, value, bound) for name, value, bound in found if value is not None]


NOTE = f"""\
*Seconds* of `load_state_from_peers` of an averager; *CPU* of the processes, from before to after. *sealed*: the
measure, `benchmarks/sealed.py`, sending one way. *digests*: BLAKE3 alone; a donor makes them, a newcomer checks them.
Steps: the donor trains with `shoal.Optimizer` (33 million parameters, Adam, batches of 32, one thread) and ends no
epoch meanwhile, so its state is copied once; the newcomer calls `Optimizer.load_state_from_peers` {DOWNLOADS} times."""


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="downloads of each side (default: 15)")
    parser.add_argument("--elements", type=int, default=100_000_000, help="float32 of the state (default: 100 million)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for download.md and download.json")
    add_before(parser)
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        logs = Path(folder)
        sides = {"shoal": ROOT} | ({"before": tree_with(options.before, logs)} if options.before else {})
        measured = time_downloads(sides, options.elements, options.rounds, logs)
        steps = {}
        for side, tree in sides.items():
            say(f"a donor's steps, {side}")
            steps[side] = time_steps(tree, logs)
    figures = compare(measured, steps)
    rows = [
        [side, *(number(found, 3) for found in (of["downloads"][0], median(of["downloads"][1:])))]
        for side, of in steps.items()
    ]
    parts = [
        f"# A state of {4 * options.elements / 1e6:g} MB from one donor",
        report.describe(facts | {"rounds": options.rounds}),
        download_table(measured),
        step_table(steps),
        report.table(["downloads from the trainer, s", "the first", "the others, median"], rows),
        NOTE,
        report.figure_table(figures, "figure"),
    ]
    data = {
        "environment": facts,
        "downloads": measured,
        "steps": steps,
        "figures": [vars(figure) | {"met": figure.met} for figure in figures],
    }
    report.publish(options.out, "download", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
