"""What a training keeps of its machines' work while they are killed, stopped, slowed down and cut off: Shoal, torchft.

    python -m benchmarks.goodput --torchft-python .venv-torchft/bin/python        (or: make goodput)
    python -m benchmarks.goodput --faults none kill stop-10 --modes synchronous --repetitions 1
    python -m benchmarks.goodput --before ../before --sides shoal before --faults none stop-10
    python -m benchmarks.goodput --long

Eight replicas train a small model, in steps of 0.1 s and epochs of ten steps of each, while faults happen to one after
another; all sides get the same faults, and take turns. A replica that is killed has a successor at once. Where network
namespaces can be made (root, iproute2), each replica lives in one; else none is cut off. All traces stay in
runs/goodput, for `shoal plot`.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.goodput_figures import (
    ALL_EVERY,
    KINDS,
    LOST,
    Fault,
    Goodput,
    loss_beside,
    measure,
    schedule,
    share_there,
)
from benchmarks.places import Place, places
from benchmarks.processes import ROOT, WorkerError, add_before, end_on_signals, tree_with
from benchmarks.replicas import HEARTBEAT, JOIN, LIMIT, STEP_SECONDS, WIDTH, Replicas, Side
from benchmarks.report import Figure, median, number, paired
from benchmarks.workers.goodput_replica import BATCH, STEPS

SIDES = {"shoal": "Shoal", "before": "Shoal before", "torchft": "torchft"}
MODES = ("synchronous", "delayed", "DiLoCo")
ONLY_SHOAL = ("delayed",)
FAULTS = ("none", *KINDS, "all")
RESULTS = Path(__file__).resolve().parent / "results"
TRACES = ROOT / "runs" / "goodput"
BEAT = 0.02  # seconds between two looks at the replicas
CURVE = 100  # points of a loss curve in the JSON


@dataclass(frozen=True)
class Cell:
    """A row of the table."""

    mode: str
    fault: str
    side: str


@dataclass(frozen=True)
class Run:
    """One run of a cell.

    Attributes:
        share: of the replicas' time, that in which they ran.
        goodput: what it has kept; None if it failed.
        whole: seconds from the first fork to the first step of all replicas.
        ended: replicas that ended by themselves.
        failure: why it failed.
    """

    share: float
    goodput: Goodput | None = None
    whole: float | None = None
    ended: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Plan:
    """How long each run is, how many replicas it has, and each how many seconds one suffers a fault (None: by kind)."""

    replicas: int
    seconds: float
    every: float | None
    seed: int

    @property
    def per_second(self) -> float:
        """The samples that all replicas would compute."""
        return self.replicas * BATCH / STEP_SECONDS

    def faults(self, name: str, turn: int, *, can_cut: bool) -> list[Fault]:
        """What happens in a run."""
        if name == "none":
            return []
        kinds = [kind for kind in KINDS.values() if can_cut or kind.act != "cut"] if name == "all" else [KINDS[name]]
        every = self.every or (ALL_EVERY if name == "all" else kinds[0].every)
        return schedule(kinds, self.replicas, self.seconds, every, self.seed + turn)


def run(side: Side, mode: str, faults: Sequence[Fault], plan: Plan, homes: Sequence[Place], folder: Path) -> Run:
    """Measures one run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = Run(share_there(faults, plan.replicas, plan.seconds))
    try:
        with Replicas(side, mode, homes, folder) as replicas:
            began = replicas.wait_until_whole()
            to_come = list(faults)
            while (now := time.time() - began) < plan.seconds:
                if to_come and now >= to_come[0].at:
                    replicas.strike(to_come.pop(0))
                replicas.tend()
                time.sleep(BEAT)
            replicas.relieve_all()
            replicas.wait_for_step(began + plan.seconds)
        goodput = measure(replicas.lines(), replicas.lives, began, plan.seconds, plan.per_second)
        return replace(result, goodput=goodput, whole=began - replicas.began, ended=replicas.ended)
    except WorkerError as error:
        return replace(result, failure=str(error).splitlines()[0])


Runs = dict[Cell, list[Run]]


def kept(runs: Runs, cell: Cell) -> list[float | None]:
    """Of each run: its goodput, of that without faults times the share of the replicas that ran."""
    without = of_runs(runs.get(replace(cell, fault="none"), []), "of_ideal")
    mine = [one.goodput.of_ideal / one.share if one.goodput else None for one in runs[cell]]
    return [a / b if a is not None and b else None for a, b in zip(mine, without, strict=False)]


def losses(runs: Runs, cell: Cell) -> list[float | None]:
    """Of each run: its loss, of that without faults after as many samples."""
    without = runs.get(replace(cell, fault="none"), [])
    pairs = zip(runs[cell], without, strict=False)
    return [loss_beside(a.goodput.curve, b.goodput.curve) if a.goodput and b.goodput else None for a, b in pairs]


def of_runs(runs: Sequence[Run], field: str) -> list[float | None]:
    """A field of the goodput of each run."""
    return [getattr(one.goodput, field) if one.goodput else None for one in runs]


def kept_table(runs: Runs) -> str:
    """What became of the samples."""
    head = ["faults: who", "of ideal", "least - most", "of its own, of those that ran", *(f"% {each}" for each in LOST)]
    rows = []
    for cell, mine in runs.items():
        good = [one.goodput for one in mine if one.goodput]
        ideal = [goodput.of_ideal for goodput in good]
        rows.append(
            [
                f"{cell.fault}: {SIDES[cell.side]}",
                number(median(ideal)),
                f"{min(ideal):.2f} - {max(ideal):.2f}" if ideal else "-",
                number(median(kept(runs, cell))),
                *(number(median(100 * goodput.lost[reason] for goodput in good), 1) for reason in LOST),
            ]
        )
    return report.table(head, rows)


def run_table(runs: Runs) -> str:
    """How the training went on."""
    head = [
        "faults: who",
        "longest pause s",
        "median s",
        "newcomer s",
        "counted",
        "unlike",
        "forked",
        "loss",
        "start s",
    ]
    rows = []
    for cell, mine in runs.items():
        good = [one.goodput for one in mine if one.goodput]
        newcomers = [seconds for goodput in good for seconds in goodput.newcomers]
        started, steps = sum(goodput.started for goodput in good), sum(goodput.steps for goodput in good)
        rows.append(
            [
                f"{cell.fault}: {SIDES[cell.side]}",
                number(median(of_runs(mine, "longest")), 1),
                number(median(of_runs(mine, "median")), 2),
                number(median(newcomers), 1),
                f"{len(newcomers)} of {started}" if started else "-",
                f"{sum(goodput.unlike for goodput in good)} of {steps}",
                f"{sum(goodput.forked for goodput in good)} of {steps}",
                number(median(losses(runs, cell)), 3),
                number(median(one.whole for one in mine), 1),
                str(sum(one.ended for one in mine)),
                f"{len(mine) - len(good)} of {len(mine)}",
            ]
        )
    return report.table([*head, "ended", "failed"], rows)


def figures(runs: Runs, plan: Plan, *, is_long: bool) -> list[Figure]:
    """What is promised of Shoal, as far as it was measured."""
    found = []

    def promise(name: str, values: Sequence[float | None], bound: str) -> None:
        if (value := median(values)) is not None:
            found.append(Figure(name, value, bound))

    for cell in runs:
        if cell.side != "shoal":
            continue
        name, goodput = f"{cell.mode}, {cell.fault}", of_runs(runs[cell], "of_ideal")
        theirs = runs.get(replace(cell, side="torchft"))
        beside = [] if theirs is None else [paired(goodput, of_runs(theirs, "of_ideal"))]
        match cell.mode, cell.fault:
            case "synchronous", "kill" | "stop-10":
                least, pause = (0.94, 1.5) if cell.fault == "kill" else (0.85, 3.0)
                promise(f"{name}: of its own without faults, of those that ran", kept(runs, cell), f">= {least}")
                usual = median(of_runs(runs.get(replace(cell, fault="none"), []), "median"))
                if usual is not None:
                    promise(f"{name}: longest pause, s", of_runs(runs[cell], "longest"), f"<= {pause + usual:.2f}")
            case "synchronous", "all" if is_long:
                promise(f"{name}: of its own without faults, of those that ran", kept(runs, cell), ">= 0.977")
                promise(f"{name}: steps with unlike parameters", of_runs(runs[cell], "unlike"), "<= 0")
        bound = {"none": ">= 1", "stop-10": ">= 1", "kill": ">= 1.3"}.get(cell.fault, "")
        promise(f"{name}: of ideal, Shoal / torchft", beside, bound if cell.mode == "DiLoCo" else "")
    return found


def note(plan: Plan, why_not_cut: str) -> str:
    """What the tables mean."""
    where = f"on the loopback, and nobody is cut off ({why_not_cut})" if why_not_cut else "in a network namespace each"
    every = {name: f"{kind.every:g}" for name, kind in KINDS.items()} | {"all": f"{ALL_EVERY:g}"}
    each = f"{plan.every:g} s" if plan.every else ", ".join(f"{name} {seconds} s" for name, seconds in every.items())
    return f"""\
{plan.replicas} replicas, {where}, for {plan.seconds:g} s after the first step of all. A step has {BATCH} samples and
takes {STEP_SECONDS} s, of which the compute is a part: as if another device made it; an epoch has {STEPS} steps of
each replica. The model has three layers of {WIDTH}, stepped by AdamW. A fault each: {each} (*all*: kinds are drawn);
*slow* takes four times as long, *slow* and *cut* last 10 s. *Of ideal*: samples in committed steps, of what the
replicas would compute without faults or overhead. *Of its own, of those that ran*: the same, of a run without faults
times the share of the replicas that ran. A replica that is stopped or cut off counts as absent, a slow one as a
quarter of one, and one that is killed as present: its successor is forked at once, from a process that has imported
the library. *%*: samples that were computed and are in no step, of the ideal: *killed* with their replica; *left out*
of a round, or in a step that a replica made on its own; *late*: its replica had to fetch a newer state; *epoch
repeated*: the round had no result. *Pause*: between two committed steps. *Newcomer*: from a successor's fork to the
first step with samples of its own, and of how many it *counted*. *Unlike*: steps after which their members held
different parameters (SHA-256; in DiLoCo, one that was left out and keeps its inner steps is compared when they are in a
step). *Forked*: steps beside which a replica made others on its own. *Loss*: of training, of
that without faults after as many samples. *Start*: from the first fork to the first step of all. *Ended*: replicas
that ended by themselves, and were started anew. Figures are medians of the runs. torchft's time-outs are tuned in its
favour: heartbeat {HEARTBEAT} ms, join {JOIN} ms, {LIMIT:g} s for collectives and the manager (its defaults: 5000,
60000, 60). Shoal has its defaults."""


def text_of(runs: Runs, facts: dict[str, Any], plan: Plan, why_not_cut: str) -> str:
    """The report."""
    parts = [f"# What {plan.replicas} replicas keep of their work while faults happen", report.describe(facts)]
    for mode in MODES:
        of_mode = {cell: mine for cell, mine in runs.items() if cell.mode == mode}
        if of_mode:
            parts += [f"## {mode}", kept_table(of_mode), run_table(of_mode)]
    return "\n\n".join([*parts, note(plan, why_not_cut)])


def thinned(one: Run) -> dict[str, Any]:
    """A run as JSON, with some points of its curve."""
    data = asdict(one)
    if one.goodput:
        points = one.goodput.curve
        data["goodput"]["curve"] = points[:: -(-len(points) // CURVE)] if points else []
    return data


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft-python", metavar="PATH", help="interpreter of a venv with torchft-nightly")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, help="default: all of which the interpreter or tree is given"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all; with --long synchronous")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="default: each, then all; with --long none and all")
    parser.add_argument("--replicas", type=int, help="default: 8; with --long 16")
    parser.add_argument("--seconds", type=float, help="of a run (default: 48; with --long 1800)")
    parser.add_argument("--every", type=float, help="seconds between two faults (default: by kind; with --long 29)")
    parser.add_argument("--repetitions", type=int, help="of each run (default: 3; with --long 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedules (default: 1)")
    parser.add_argument(
        "--long", action="store_true", help="16 replicas for 30 minutes, a fault each 29 s, of all kinds"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for goodput.md and goodput.json")
    add_before(parser)
    options = parser.parse_args()
    defaults: dict[str, Any] = {"modes": MODES, "faults": FAULTS, "replicas": 8, "seconds": 48.0, "repetitions": 3}
    if options.long:
        defaults = {"modes": MODES[:1], "faults": ("none", "all"), "replicas": 16, "seconds": 1800.0, "repetitions": 1}
        defaults["every"] = 29.0
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    given = {"torchft": options.torchft_python, "before": options.before}
    options.sides = options.sides or [side for side in SIDES if given.get(side, True)]
    if "torchft" in options.sides and not options.torchft_python:
        parser.error("torchft runs in a venv of its own: name its interpreter with --torchft-python")
    if "before" in options.sides and not options.before:
        parser.error("name the worktree of before with --before")
    return options


def main() -> None:
    """Measures, reports; exit code 1 when replicas of Shoal held unlike parameters, or a run of it failed."""
    options = parse()
    end_on_signals()
    facts = report.environment()
    plan = Plan(options.replicas, options.seconds, options.every, options.seed)
    runs: Runs = {}
    with tempfile.TemporaryDirectory(prefix="shoal-goodput-") as temporary, places(plan.replicas + 1) as (homes, why):
        sides = {
            "shoal": Side("shoal", "shoal", sys.executable, ROOT),
            "before": Side("before", "shoal", sys.executable, tree_with(options.before, Path(temporary)))
            if options.before
            else None,
            "torchft": Side("torchft", "torchft", str(options.torchft_python), ROOT),
        }
        if why:
            print(f"no network namespaces, so no replica is cut off: {why}", file=sys.stderr, flush=True)
        turns = itertools.product(range(options.repetitions), options.modes, options.faults, options.sides)
        for turn, mode, fault, name in turns:
            side = sides[name]
            if side is None or (side.system == "torchft" and mode in ONLY_SHOAL) or (fault == "cut" and why):
                continue
            faults = plan.faults(fault, turn, can_cut=not why)
            folder = TRACES / f"{mode}-{fault}-{name}-{turn}"
            one = run(side, mode, faults, plan, homes, folder)
            runs.setdefault(Cell(mode, fault, name), []).append(one)
            print(f"{mode}, {fault}, {name}, {turn}: {one.goodput or one.failure}", file=sys.stderr, flush=True)
    promised = figures(runs, plan, is_long=options.long)
    text = text_of(runs, facts | {"repetitions": options.repetitions, "seed": options.seed}, plan, why)
    if promised:
        text += "\n\n" + report.figure_table(promised)
    data = {
        "environment": facts,
        "options": asdict(plan),
        "cells": [asdict(cell) | {"runs": [thinned(one) for one in mine]} for cell, mine in runs.items()],
        "figures": [asdict(figure) | {"met": figure.met} for figure in promised],
    }
    report.publish(options.out, "goodput-long" if options.long else "goodput", text, data)
    ours = [one for cell, mine in runs.items() if cell.side == "shoal" for one in mine]
    sys.exit(0 if all(one.goodput and not one.goodput.unlike for one in ours) else 1)


if __name__ == "__main__":
    main()
