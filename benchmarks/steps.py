"""Whether a step got slower: CPU seconds of single steps beside another commit's, in one process and in clusters.

    python -m benchmarks.steps ../before [NOW_TREE] [--pairs 40] [--only NAME ...]
    python -m benchmarks.steps ../before --messages

Steps that accumulate, ends of epochs, inner steps of DiLoCo, and the first two in clusters of ranks. Both sides take
turns in bursts of some steps, and who begins changes from pair to pair. What is compared is the CPU time, user and
system, of all threads of all ranks. `--messages` counts what the ranks of a cluster send each other instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, Worker, checkout, end_on_signals, tree_with
from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from benchmarks.workers.steps import KINDS, Kind

RESULTS = Path(__file__).resolve().parent / "results"
TURNS = 8  # pairs of the same processes: of one code, one process needs up to 4 % more than another
TIMEOUT = 120.0  # seconds for a burst
BOUND = "<= 1.02"
SIDES = ("before", "now")
SENT = ("messages", "bytes", "collectives")

NOTE = """\
CPU time of user and system, of all threads of all ranks, for one step; *ratio* is the median of the ratios of two
bursts in a row, one of each side, and beside it their quartiles. The processes are new ones every 8 pairs. Each rank is
a process, its group gloo, all on one machine; both sides run on the same cores, a rank on one. The gradients are there
already."""

NOTE_OF_MESSAGES = """\
Of all ranks together, for one step: messages and their bytes over the connections between ranks, and calls of torch's
collectives, of which each rank makes one. Each rank is a process, its group gloo, all on one machine."""

Found = dict[str, list[dict[str, float]]]


class Side:
    """The processes of one checkout: one, or the ranks of a cluster.

    Args:
        within: ends them.
        tree: where they run.
        folder: for their logs.
        ranks: how many.
        counts: whether they count messages.
    """

    def __init__(self, within: contextlib.ExitStack, tree: Path, folder: Path, ranks: int, *, counts: bool) -> None:
        folder.mkdir(parents=True)
        self._workers = []
        for rank in range(ranks):
            told = json.dumps({"rank": rank, "size": ranks, "folder": str(folder), "counts": counts})
            worker = Worker(
                sys.executable,
                "benchmarks.workers.steps",
                [told],
                folder / f"{rank}.log",
                tree,
                variables={"PYTHONHASHSEED": "0"},
            )
            within.callback(worker.stop, 10.0)
            self._workers.append(worker)
        for worker in self._workers:  # first of all
            within.callback(worker.hang_up)

    def ask(self, command: str, **given: Any) -> list[Any]:
        """What each process answers; they do it at once."""
        for worker in self._workers:
            worker.send(command, **given)
        return [worker.receive(TIMEOUT) for worker in self._workers]

    def burst(self) -> dict[str, float]:
        """Of all processes together; the seconds of the slowest."""
        told = self.ask("burst")
        return {key: (max if key == "seconds" else sum)(one[key] for one in told) for key in ("cpu", "seconds", *SENT)}


def measure(
    trees: dict[str, Path], kinds: dict[str, Kind], pairs: int, folder: Path, *, counts: bool
) -> Iterator[tuple[str, Found]]:
    """Of each kind: the bursts of both sides, pair by pair. Kinds of as many ranks share their processes."""
    found: dict[str, Found] = {name: {side: [] for side in SIDES} for name in kinds}
    for ranks in sorted({kind.ranks for kind in kinds.values()}):
        names = [name for name, kind in kinds.items() if kind.ranks == ranks]
        for first in range(0, pairs, TURNS):
            with contextlib.ExitStack() as within:
                sides = {
                    side: Side(within, tree, folder / f"{side} {ranks} {first}", ranks, counts=counts)
                    for side, tree in trees.items()
                }
                for name in names:
                    order = list(SIDES)
                    for side in order:
                        sides[side].ask("begin", name=name)
                    for _ in range(min(TURNS, pairs - first)):
                        order.reverse()
                        for side in order:
                            found[name][side].append(sides[side].burst())
                    for side in order:
                        sides[side].ask("end")
            print(f"{ranks} ranks: {min(pairs, first + TURNS)} pairs", file=sys.stderr, flush=True)
        for name in names:
            yield name, found[name]


def ratios(found: Found, key: str) -> list[float]:
    """Of now to before, pair by pair."""
    return [now[key] / before[key] for before, now in zip(found["before"], found["now"], strict=True)]


def report_cpu(all_found: dict[str, Found]) -> tuple[str, list[Figure]]:
    """A table, and what is promised."""
    rows, figures = [], []
    for name, found in all_found.items():
        medians = [1e6 * statistics.median(one["cpu"] for one in found[side]) for side in SIDES]
        low, middle, high = _quartiles(ratios(found, "cpu"))
        spread = f"{number(low, 3)} to {number(high, 3)}"
        of_seconds = statistics.median(ratios(found, "seconds"))
        cells = [*(number(each, 1) for each in medians), number(middle, 3), spread, number(of_seconds, 3)]
        rows.append([f"{KINDS[name].label} (`{name}`)", *cells])
        figures.append(Figure(f"CPU of {KINDS[name].label}, of before", middle, BOUND))
    head = ["what", "CPU us before", "CPU us now", "ratio", "quartiles", "ratio of seconds"]
    return table(head, rows), figures


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def report_messages(all_found: dict[str, Found]) -> tuple[str, list[Figure]]:
    """What the ranks of a cluster send each other in a step."""
    rows, figures = [], []
    for name, found in all_found.items():
        cells: list[str] = []
        for key in SENT:
            before, now = (statistics.median(one[key] for one in found[side]) for side in SIDES)
            cells += [f"{before:g}", f"{now:g}"]
            if not KINDS[name].ends:
                figures.append(Figure(f"{key} of {KINDS[name].label}, less before's", now - before, "<= 0"))
        rows.append([f"{KINDS[name].label} (`{name}`)", *cells])
    head = ["what", *(f"{key} {side}" for key in SENT for side in SIDES)]
    return table(head, rows), figures


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=checkout, help="a worktree of another commit")
    parser.add_argument("now", type=checkout, nargs="?", default=ROOT, help="a second one (default: this checkout)")
    parser.add_argument("--pairs", type=int, default=40, help="of bursts, one of each side (default: 40)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(KINDS)}; or parts of it")
    parser.add_argument("--messages", action="store_true", help="count messages between ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for steps.md and steps.json")
    options = parser.parse_args()
    end_on_signals()
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if (not options.only or any(part in name for part in options.only)) and (kind.strands or not options.messages)
    }
    if not kinds:
        parser.error(f"--only {' '.join(options.only)}: there is none of that name")
    facts = environment() | {"before": options.before.name, "now": options.now.name}
    pairs = 3 if options.messages else options.pairs
    with tempfile.TemporaryDirectory(prefix="shoal-steps-") as temporary:
        folder, trees = Path(temporary), {}
        for side, tree in zip(SIDES, (options.before, options.now), strict=True):
            (folder / side).mkdir()
            trees[side] = tree_with(tree, folder / side)
        found = dict(measure(trees, kinds, pairs, folder, counts=options.messages))
    text, figures = report_messages(found) if options.messages else report_cpu(found)
    note = NOTE_OF_MESSAGES if options.messages else NOTE
    title = "Messages between the ranks of a cluster" if options.messages else "CPU of single steps"
    parts = [f"# {title}", describe(facts), text, note, figure_table(figures)]
    data: dict[str, Any] = {
        "environment": facts,
        "bursts": found,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    publish(options.out, "step_messages" if options.messages else "steps", "\n\n".join(parts), data)
    sys.exit(0 if all(figure.met for figure in figures) else 1)


if __name__ == "__main__":
    main()
