"""A newcomer whose download takes longer than an epoch: when it takes part, and what that costs the run.

    python -m benchmarks.joining --bed ../shared/linkbed --before ../before --hivemind .venv-hivemind/bin/python
    python -m benchmarks.joining --bed ../shared/linkbed --cells 20:160 5:512 20:diloco
    python -m benchmarks.joining --bed ../shared/linkbed --members 3 --epoch 30 --state-mb 200 [--wait 0]
    python -m benchmarks.joining --bed ../shared/linkbed --members 4 --newcomers 4

A cell is RATE:TARGET: one peer trains a model of 4.6 million parameters with Adam (state S, result of a round R = S/3),
a step of 16 samples each 0.2 s, an epoch each TARGET samples (or DiLoCo with 20 inner steps); after 8 s, in the middle
of an epoch, a second one comes, over a line of RATE Mbit/s (0: no limit). With `--members` so many train, and so many
newcomers come at once; `--state-mb` is of parameters and momentum. Each cell ends when the newcomers have had three
epochs with members, or after 4 S/L, four epochs and a minute. `--before` and `--hivemind` (with its defaults) take
turns. Needs what `benchmarks.links` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.links import RESULTS, Peer, load_bed
from benchmarks.processes import ROOT, add_before, end_on_signals, session_processes, tree_with
from benchmarks.report import Figure, describe, environment, figure_table, number, table

CELLS = ("0:16", "200:16", "60:16", "60:160", "20:16", "20:160", "20:512", "5:512", "20:diloco")
WIDTH, BATCH, STEP, INNER_STEPS, DELAY = 1500, 16, 0.2, 20, 15.0
ALONE = 8.0  # seconds of training before a newcomer comes
COMMON = 3  # epochs with members, after which a cell ends
SLOW = 20.0  # Mbit/s, up to which the line's time is promised, and beyond which what was before
HEAD = ["Mbit/s: target", "side", "an epoch alone, s", "in after, s", "from fork, s", "downloads", "MB received"]
HEAD += ["MB over the line", "own epochs", "forks", "warnings, doubts"]
HEAD += ["pauses", "longest, s", "in all, s", "epochs/s of before"]


@dataclass(frozen=True)
class Cell:
    """Who trains and who comes, over which lines (Mbit/s of members and of newcomers, 0: no limit)."""

    name: str
    rates: tuple[float, float]
    target: int | None  # samples of an epoch; None: DiLoCo
    members: int = 1
    newcomers: int = 1
    width: int = WIDTH
    momentum: float | None = None  # of SGD; None: Adam
    step: float = STEP

    @property
    def result(self) -> float:
        """R: megabytes of a round's result."""
        return (2 * self.width**2 + 75 * self.width + 8) * 4 / 1e6

    @property
    def state(self) -> float:
        """S: megabytes of the state; with DiLoCo it is the parameters and the outer momentum."""
        return self.result * (2 if self.momentum or self.target is None else 3)

    @property
    def epoch(self) -> float:
        """Seconds that the steps of the members' epoch take."""
        return self.step * (INNER_STEPS if self.target is None else math.ceil(self.target / BATCH / self.members))

    def seconds(self, megabytes: float) -> float:
        """What so many need on a newcomer's line."""
        return megabytes * 8 / self.rates[1] if self.rates[1] else 0.0


@dataclass(frozen=True)
class Side:
    """A library, and the options of its optimizers."""

    name: str
    library: str
    python: str
    tree: Path
    options: dict[str, Any]


def table_cell(name: str) -> Cell:
    """The cell RATE:TARGET."""
    rate, target = name.split(":")
    return Cell(name, (float(rate), float(rate)), None if target == "diloco" else int(target))


def crowds(args: argparse.Namespace) -> list[Cell]:
    """Several members and one newcomer, then as many newcomers as are wished."""
    width = round((math.sqrt(75**2 + args.state_mb * 1e6) - 75) / 4) if args.state_mb else WIDTH
    momentum = 0.9 if args.state_mb else None
    rates = args.rates or ((200.0, 100.0) if args.state_mb else (100.0, 20.0))
    alone = Cell("alone", (rates[0], rates[0]), 1, args.members, width=width)
    a_round = 1.3 * 2 * (args.members - 1) / args.members * alone.seconds(alone.result)  # as long as it may take
    step = max(STEP, args.epoch / 30)  # a larger model's compute takes longer
    target = max(1, round((args.epoch - a_round) / step)) * BATCH * args.members
    return [
        Cell(f"{count} to {args.members}", tuple(rates), target, args.members, count, width, momentum, step)
        for count in sorted({1, args.newcomers})
    ]


@contextlib.contextmanager
def killed_at_end(peers: list[Peer]) -> Iterator[None]:
    """Ends all that the peers have started."""
    try:
        yield
    finally:
        for peer in peers:
            for process in session_processes(peer.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            peer.end(10)


def run(bed_class: Any, cell: Cell, side: Side, folder: Path) -> dict[str, Any]:
    """One cell of one side; what became of it."""
    peers: list[Peer] = []
    options = side.options | ({"target_batch_size": cell.target} if cell.target else {})
    given = {"library": side.library, "width": cell.width, "momentum": cell.momentum, "step": cell.step}
    given |= {"inner_steps": None if cell.target else INNER_STEPS, "options": options}
    # One process passes all packets: fast lines have large ones.
    mtu = 9000 if cell.members * cell.rates[0] > 500 else 1500
    with (
        bed_class(cell.members + cell.newcomers, mtu=mtu) as bed,
        killed_at_end(peers),
        (folder / "log").open("w") as log,
    ):

        def start(count: int) -> list[Peer]:
            for index in range(len(peers), len(peers) + count):
                line = {"address": bed.address(index), "initial_peers": peers[0].addresses if peers else []}
                worker, python, tree = "joining_trainer", side.python, side.tree
                peers.append(Peer(bed, index, given | line, worker=worker, python=python, tree=tree, log=log))
            return peers[-count:]

        def wait(seconds: float, done: Any) -> bool:
            until = time.monotonic() + seconds
            while not done() and time.monotonic() < until:
                if any(peer.process.poll() is not None for peer in peers):
                    raise RuntimeError("a peer has ended")
                time.sleep(0.05)
            return bool(done())

        members = start(cell.members)
        for peer in members:
            peer.wait_until_made()
        if any(cell.rates):
            bed.set(delay=DELAY)
        for index in range(cell.members + cell.newcomers):
            rate = cell.rates[index >= cell.members]
            bed.set_link(index, up=rate, down=rate)
        for peer in members:
            peer.begin()
        time.sleep(ALONE)
        if not wait(120 + 8 * cell.epoch, lambda: all(len(whole(peer, cell)) > COMMON for peer in members)):
            raise RuntimeError("the members did not train")
        time.sleep(cell.epoch / 2)
        newcomers = start(cell.newcomers)
        for peer in newcomers:
            peer.begin()
        limit = 4 * cell.seconds(cell.state) + 4 * cell.epoch + 60
        wait(limit, lambda: all(len(common(peer, members, cell)) >= COMMON for peer in newcomers))
        found = report(cell, members, newcomers, time.monotonic())
    return {"cell": cell.name, "side": side.name, **found}


def whole(peer: Peer, cell: Cell) -> list[dict[str, Any]]:
    """A member's epochs with all members."""
    return [line for line in peer.of("EpochReport") if line["peers"] >= cell.members]


def common(newcomer: Peer, members: list[Peer], cell: Cell) -> list[dict[str, Any]]:
    """A newcomer's epochs that members have made with it; not those whose result it has fetched afterwards."""
    ended = shared(members, at_least=len(members) + 1)
    taken = [line for line in newcomer.of("EpochReport") if line["peers"] > len(members)]
    late = 1 + cell.seconds(cell.result) / 2
    return [line for line in taken if line["time"] < ended.get((line["epoch"], line["digest"]), 0.0) + late]


def shared(members: list[Peer], at_least: int = 1) -> dict[tuple[int, str], float]:
    """When members had ended their epochs that so many made; each with the digest of its state."""
    lines = [line for peer in members for line in peer.of("EpochReport") if line["peers"] >= at_least]
    return {(line["epoch"], line["digest"]): line["time"] for line in lines}


def report(cell: Cell, members: list[Peer], newcomers: list[Peer], ended: float) -> dict[str, Any]:
    """The figures of one run; of each newcomer until its first common epoch."""
    forked = newcomers[0].began
    before = [line["time"] for line in whole(members[0], cell) if line["time"] < forked]
    usual = statistics.median(b - a for a, b in pairwise(before))
    long = 1 + 1.25 * usual  # an epoch with a pause
    theirs = shared(members)

    def is_own(line: dict[str, Any]) -> bool:
        alone = (line["epoch"], line["digest"]) not in theirs if line.get("digest") else line.get("peers") == 1
        return line["kind"] == "EpochReport" and alone

    firsts = [next(iter(common(peer, members, cell)), None) for peer in newcomers]
    ends = [first["time"] if first else ended for first in firsts]
    seen = [[line for line in p.lines if line["time"] <= end] for p, end in zip(newcomers, ends, strict=True)]
    last = max((first["epoch"] if first else math.inf for first in firsts), default=math.inf)
    pauses, speeds = [], []
    for peer in members:
        times = [line["time"] for line in peer.of("EpochReport") if line["epoch"] <= last]
        gaps = [b - a for a, b in pairwise([*times, *([ended] if last == math.inf else [])]) if b > forked]
        pauses.append([round(gap - usual, 2) for gap in gaps if gap > long])
        speeds.append(statistics.mean(b - a for a, b in pairwise(before)) / statistics.mean(gaps))
    starts = [peer.of("ready")[0]["started"] for peer in newcomers]
    everybody = [*members, *newcomers]
    return {
        "epoch": usual,
        "seconds": max(b - a for a, b in zip(starts, ends, strict=True)) if last < math.inf else None,
        "from_fork": max(ends) - forked if last < math.inf else None,
        "watched": ended - forked,
        "downloads": [sum(line["kind"] == "DownloadReport" for line in lines) for lines in seen],
        "received": [max((line.get("bytes", 0) for line in lines), default=0) / 1e6 for lines in seen],
        "line": [lines[-1]["line_bytes"] / 1e6 for lines in seen],
        "own_epochs": [sum(is_own(line) for line in lines) for lines in seen],
        "forks": sum(len(peer.of("ForkReport")) for peer in everybody),
        "warnings": [log["text"] for p in everybody for log in p.of("log") if is_warning(log)],
        "pauses": pauses,
        "round": sum(line["round"] for line in members[0].of("EpochReport") if line["epoch"] == last),
        "speed": min(speeds),
        "timeline": timeline(members, newcomers, long),
    }


def is_warning(log: dict[str, Any]) -> bool:
    """Doubts count, too: they are told as INFO."""
    return log["level"] != "INFO" or "doubt" in log["text"]


def timeline(members: list[Peer], newcomers: list[Peer], long: float) -> list[str]:
    """What all saw, in seconds from the newcomer's fork; of the members' own epochs those that took so long."""
    forked, found = newcomers[0].began, []
    for index, peer in enumerate((*members, *newcomers)):
        who = f"member {index}" if peer in members else f"newcomer {index - len(members)}"
        previous = forked
        for line in (line for line in peer.lines if line["time"] >= forked):
            own = line["kind"] == "EpochReport" and peer in members and line["peers"] <= len(members)
            if not own or line["time"] - previous > long:
                found.append((line["time"] - forked, f"{who}: {line.get('text', line['kind'])[:160]}"))
            previous = line["time"] if line["kind"] == "EpochReport" else previous
    return [f"{at:6.1f} s  {text}" for at, text in sorted(found)][:60]


def row(result: dict[str, Any]) -> list[str]:
    """A row of the table. Where peers differ, it has the largest number; the JSON has all."""
    if "failed" in result:
        return [result["cell"], result["side"], *["failed"] * (len(HEAD) - 2)]
    pauses = max(result["pauses"], key=sum)
    late = f"not in {result['watched']:.0f}"
    of_shoal = [number(max(result["received"]), 0), number(max(result["line"]), 0), str(max(result["own_epochs"]))]
    of_shoal += [str(result["forks"]), str(len(result["warnings"]))]
    if result["side"] == "hivemind":  # which does not tell them
        of_shoal = ["-", *of_shoal[1:3], "-", "-"]
    row = [result["cell"], result["side"], number(result["epoch"], 1), number(result["seconds"], 1)]
    row += [number(result["from_fork"], 1) if result["seconds"] else late, str(max(result["downloads"])), *of_shoal]
    return [*row, str(len(pauses)), number(max(pauses, default=0), 1), number(sum(pauses), 1), number(result["speed"])]


def figures(cells: list[Cell], results: list[dict[str, Any]]) -> list[Figure]:
    """What the project promises of Shoal."""
    found = {(result["cell"], result["side"]): result for result in results if "failed" not in result}
    figures = []
    for cell in (cell for cell in cells if (cell.name, "Shoal") in found):
        result, before = found[cell.name, "Shoal"], found.get((cell.name, "before"))
        took, download = result["seconds"] or math.inf, cell.seconds(cell.state)
        wrong = max(result["own_epochs"]) + result["forks"] + sum("doubt" in text for text in result["warnings"])
        new = [
            ("downloads of the state", max(result["downloads"]), "<= 1"),
            ("own epochs, forks, doubts", wrong, "<= 0"),
        ]
        in_after, waits = "seconds until the first common epoch", sum(result["pauses"][0]) - result["round"]
        if cell.members == 1 and 0 < cell.rates[1] <= SLOW:
            new.append((in_after, took, f"<= {1.5 * download + 2 * cell.seconds(cell.result):.1f}"))
            new.append(("MB received until then", max(result["received"]), f"<= {2 * cell.state + cell.result:.1f}"))
            new.append(("the leader's pauses less the round, s", waits, f"<= {download + result['round']:.1f}"))
        elif cell.members == 1 and before and before["seconds"]:
            new.append((f"{in_after}, of before's", took / before["seconds"], "<= 1.05"))
        if cell.momentum:
            new.append((in_after, took, "<= 60"))
            new.append(("members' epochs per second, of before", result["speed"], ">= 0.95"))
        if cell.newcomers > 1:
            one = found.get((cells[0].name, "Shoal"), {}).get("seconds") or math.nan
            new.append(("seconds until all are in, of one's", took / one, "<= 2"))
            new.append(("pauses of a member", max(map(len, result["pauses"])), "<= 1"))
        figures += [Figure(f"{cell.name}: {what}", value, bound) for what, value, bound in new]
    return figures


def text_of(facts: dict[str, Any], cells: list[Cell], results: list[dict[str, Any]]) -> str:
    """The report."""
    sizes = {f"S = {cell.state:.1f} MB, R = {cell.result:.1f} MB ({cell.name})": None for cell in cells}
    parts = ["# Joining a run that does not wait", f"{describe(facts)}; {DELAY:g} ms one way.", "; ".join(sizes) + "."]
    parts += [table(HEAD, map(row, results)), figure_table(figures(cells, results), "figure, of Shoal")]
    for result in (result for result in results if "failed" not in result):
        lines = "\n".join(result["timeline"])
        summary = f"<details><summary>{result['cell']}, {result['side']}</summary>"
        parts += [summary, f"```text\n{lines}\n```", "</details>"]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Parses the command line; measures, and reports after each cell of each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", type=Path, required=True, help="the folder of linkbed.py")
    add_before(parser)
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="RATE:TARGET", help=f"default: {' '.join(CELLS)}")
    parser.add_argument("--members", type=int, help="in place of the cells")
    parser.add_argument("--newcomers", type=int, default=1, help="that come at once, after a cell with one")
    parser.add_argument("--epoch", type=float, default=5.0, help="seconds of the members' epochs, with their rounds")
    parser.add_argument("--state-mb", type=float, help="SGD with momentum, and so large a state (default: Adam, 55 MB)")
    parser.add_argument(
        "--rates", type=float, nargs=2, help="Mbit/s of members and newcomers (default: 200 100; 100 20)"
    )
    parser.add_argument("--wait", type=float, help="the option wait_for_newcomers of Shoal's peers")
    parser.add_argument("--name", default="joining", help="of the files in benchmarks/results")
    args = parser.parse_args()
    end_on_signals()
    cells = crowds(args) if args.members else [table_cell(name) for name in args.cells]
    bed_class, facts, results = load_bed(args.bed), environment(), []
    RESULTS.mkdir(exist_ok=True)
    print(table(HEAD, []), flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-joining-") as temporary:
        folder = Path(temporary)
        sides = [Side("before", "shoal", sys.executable, tree_with(args.before, folder), {})] if args.before else []
        waits = {} if args.wait is None else {"wait_for_newcomers": args.wait}
        sides.append(Side("Shoal", "shoal", sys.executable, ROOT, waits))
        if args.hivemind:
            sides.append(Side("hivemind", "hivemind", args.hivemind, ROOT, {}))
        for cell, side in ((cell, side) for cell in cells for side in sides):
            if side.library == "hivemind" and cell.target is None:
                continue  # it has no DiLoCo
            try:
                results.append(run(bed_class, cell, side, folder))
            except Exception as error:  # noqa: BLE001 - the other cells are measured
                results.append({"cell": cell.name, "side": side.name, "failed": repr(error)})
                print(f"{error!r}; the end of the log:\n{(folder / 'log').read_text()[-2000:]}", file=sys.stderr)
            print(table(row(results[-1]), []).splitlines()[0], flush=True)
            (RESULTS / f"{args.name}.md").write_text(text_of(facts, cells, results))
            data = {"environment": facts, "cells": [asdict(cell) for cell in cells], "results": results}
            (RESULTS / f"{args.name}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(figure_table(figures(cells, results), "figure, of Shoal"))


if __name__ == "__main__":
    main()
