"""How much of Shoal one epoch passes, and how large that is: functions, files, code lines, branches, constructors.

    python -m benchmarks.walk [--tree WORKTREE] [--files]
    python -m benchmarks.walk --check | --write | --keep NAME [--tree WORKTREE]

Peers train a tiny model over loopback, in five cases: one process; the optimizer on the host, with gradients averaged
in the background; DiLoCo; a cluster of two ranks with strands; two runs in one thread. After the start, every function
of `shoal/` is recorded that is called in any thread during one epoch: from the first step to the commit that is
applied. In the case of strands that is at one rank, else at both peers, which are in one process. The rest is read from
the source: see `benchmarks.structure` and `benchmarks.branches`.

What is read from the source is also in docs/architecture.md, beside two older commits'. `--check` compares it, and
`--write` writes it there; `--keep` makes what a tree has a column of that table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.branches import OF_OBJECTS, QUESTIONS
from benchmarks.branches import measure as count
from benchmarks.processes import ROOT, checkout, tree_with
from benchmarks.structure import room_of

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = RESULTS / "walk_columns.json"  # what older commits have: CI has no history
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- python -m benchmarks.walk --write: begin -->", "<!-- end -->"
TIMEOUT = 600.0  # seconds
REBUILT = ("optim", "cluster")
CASES = ("one process", "offload, delayed", "DiLoCo", "strands", "two runs")
RANKS = {"strands, rank 0": 0, "strands, rank 1": 1, "strands, the other peer": -1}
LONG = 400  # lines of a file
COLLABORATORS = 6
LISTED = 12  # constructors

NOTE = """\
*Passed*: functions (files) called during the epoch, in the trainers' threads, on the reactor, or in a thread of its
own; coroutines that were resumed count too, comprehensions do not. Of the epochs that were recorded it is the one with
the median number of functions. *Offload, delayed*: with `offload_optimizer` and `delay_grad_averaging`. *Code lines*:
without docstrings, comments and blank lines. *Circle*: modules that import each other, imports under TYPE_CHECKING
counted. *Collaborator*: a parameter of a constructor whose annotation names more than values (numbers, text, bytes,
tensors, containers of these, enums, immutable records of these)."""

Epoch = dict[str, list[str]]
"""The functions that were called, by file."""


def run_worker(there: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `benchmarks.workers.walk` in a tree."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.workers.walk", *arguments],
        cwd=there,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(there), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
    )


def answer_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints. Raises RuntimeError if it fails."""
    said, _ = worker.communicate(timeout=TIMEOUT)
    if worker.returncode:
        raise RuntimeError(f"{' '.join(map(str, worker.args))} has ended with {worker.returncode}")  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def walk(there: Path, case: str, epochs: int) -> dict[str, dict[str, Any]]:
    """What the workers of a case find."""
    own = ["--epochs", str(epochs), "--case", case]
    with contextlib.ExitStack() as stack:
        if case != "strands":
            given = {case: [*own, *(["--structure"] if case == CASES[0] else [])]}
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-ranks-"))
            given = {name: [*own, "--rank", str(rank), "--folder", folder] for name, rank in RANKS.items()}
        workers = {name: run_worker(there, *arguments) for name, arguments in given.items()}
        for worker in workers.values():
            stack.callback(worker.kill)
        return {name: answer_of(worker) for name, worker in workers.items()}


def measure(tree: Path, epochs: int) -> dict[str, Any]:
    """Runs all cases with the Shoal of a checkout: the epochs of each, and the structure of the source."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-walk-") as folder:
        there = tree_with(tree, Path(folder))
        for case in CASES:
            found |= walk(there, case, epochs)
            print(f"{case}: done", file=sys.stderr, flush=True)
    structure = found[CASES[0]]["structure"]
    return {"epochs": {name: answer["epochs"] for name, answer in found.items()}, "structure": structure}


def median_epoch(epochs: list[Epoch]) -> Epoch:
    """The epoch with the median number of functions."""
    return sorted(epochs, key=lambda epoch: sum(map(len, epoch.values())))[len(epochs) // 2]


def passed_rows(epochs: Mapping[str, Epoch], package: Path) -> list[list[str]]:
    """Of each room: what an epoch of each case passes."""
    rooms = sorted({room_of(package / file, package) for epoch in epochs.values() for file in epoch})
    rows = []
    for names, label in [*(((name,), name) for name in rooms), (REBUILT, " + ".join(REBUILT)), (tuple(rooms), "all")]:
        row = [label]
        for epoch in epochs.values():
            own = [functions for file, functions in epoch.items() if room_of(package / file, package) in names]
            row.append(f"{sum(map(len, own))} ({len(own)})" if own else "")
        rows.append(row)
    return rows


def room_rows(rooms: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Of each room: files, code lines, and how often it asks each question."""
    keys = ("files", "code_lines", *QUESTIONS)
    rows = [[name, *(str(rooms[name][key]) for key in keys)] for name in sorted(rooms)]
    return [*rows, ["all", *(str(sum(one[key] for one in rooms.values())) for key in keys)]]


# -- the table of the page


def column(rooms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The cells of a commit, by row."""
    optim, cluster = (rooms[name] for name in REBUILT)

    def lines(names: Any) -> str:
        own = [rooms[name] for name in names]
        return f"{sum(one['code_lines'] for one in own):,} ({sum(one['files'] for one in own)})"

    def both(count_of: Any) -> str:
        return f"{count_of(optim)}, {count_of(cluster)}"

    found = {f"code lines (files) of {name}": lines([name]) for name in REBUILT}
    found["code lines (files) of both"] = lines(REBUILT)
    found["code lines (files) of all rooms"] = lines(rooms)
    found["questions what an object is, in optim, in cluster"] = both(lambda one: sum(one[k] for k in OF_OBJECTS))
    for key in OF_OBJECTS:
        found[f"of these, {QUESTIONS[key]}"] = both(lambda one, key=key: one[key])
    for key in QUESTIONS:
        if key not in OF_OBJECTS:
            found[QUESTIONS[key]] = both(lambda one, key=key: one[key])
    for field in ("collaborators", "arguments", "attributes", "methods"):
        of = "constructor" if field in ("collaborators", "arguments") else "class"
        most, name = max((one[f"most {field}"] for one in (optim, cluster)), key=lambda each: each[0])
        found[f"most {field} of a {of} that is not public"] = f"{most} ({name})"
    return found


def table_of(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A markdown table with the rows of the last column. Older columns may lack some of them."""
    rows = list(columns.values())[-1]
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[row, *(cells.get(row, "") for cells in columns.values())] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def block() -> str:
    """What the page must have between its marks."""
    columns = {**json.loads(COLUMNS.read_text()), "now": column(count(ROOT / "shoal"))}
    return f"{BEGIN}\n\n{table_of(columns)}\n\n{END}"


def rewrite(text: str, made: str) -> str:
    """The page with another block. Raises ValueError if it has no marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.relative_to(ROOT)} has no lines {BEGIN!r} and {END!r}, between which the table stands")
    return f"{head}{made}{tail}"


def check() -> int:
    """Whether the page has what the source has; the exit status."""
    text = PAGE.read_text()
    if rewrite(text, block()) == text:
        return 0
    print(
        f"{PAGE.relative_to(ROOT)}: the table of optim and cluster is not what the source has. Write it anew, look at "
        "the difference, and commit it:\n\n    python -m benchmarks.walk --write\n",
        file=sys.stderr,
    )
    return 1


def keep(name: str, tree: Path) -> None:
    """Make what a tree has a column of the table."""
    kept = json.loads(COLUMNS.read_text()) if COLUMNS.exists() else {}
    kept[name] = column(count(tree / "shoal"))
    COLUMNS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=checkout, default=ROOT, metavar="PATH", help="a checkout of another commit")
    parser.add_argument("--epochs", type=int, default=5, help="how many are recorded, each by itself (default: 5)")
    parser.add_argument("--files", action="store_true", help="list the files that are passed, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for walk.md and walk.json")
    parser.add_argument("--check", action="store_true", help="fail if the table in docs/architecture.md is another")
    parser.add_argument("--write", action="store_true", help="write that table")
    parser.add_argument("--keep", metavar="NAME", help="make what the tree has a column of that table")
    options = parser.parse_args()
    if options.keep:
        return keep(options.keep, options.tree)
    if options.write:
        PAGE.write_text(rewrite(PAGE.read_text(), block()))
        return None
    if options.check:
        sys.exit(check())
    return report(options)


def report(options: argparse.Namespace) -> None:
    """Train, and publish."""
    from benchmarks.report import describe, environment, publish, table  # it imports torch, and --check need not wait

    facts = environment() | {"tree": options.tree.name}
    package = options.tree / "shoal"
    found, rooms = measure(options.tree, options.epochs), count(package)
    structure = found["structure"]
    epochs = {name: median_epoch(each) for name, each in found["epochs"].items()}
    counts = {name: sorted(sum(map(len, one.values())) for one in each) for name, each in found["epochs"].items()}
    crowded = structure["constructors"][:LISTED]
    too_many = [one for one in structure["constructors"] if len(one["collaborators"]) > COLLABORATORS]
    lengths = {str(path.relative_to(package)): len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    spread = "; ".join(f"{name}: {', '.join(map(str, each))}" for name, each in counts.items())
    parts = [
        "# What one epoch passes",
        describe(facts),
        table(["functions (files) passed", *epochs], passed_rows(epochs, package)),
        f"Functions passed in each recorded epoch: {spread}.",
        "## What is in the source",
        table(["room", "files", "code lines", *QUESTIONS.values()], room_rows(rooms)),
        table_of({options.tree.name: column(rooms)}),
        "Circles of imports: " + ("; ".join(", ".join(circle) for circle in structure["circles"]) or "none") + ".",
        f"Constructors with more than {COLLABORATORS} collaborators that are not public: "
        + (", ".join(one["name"] for one in too_many if not one["public"]) or "none")
        + ". The largest:",
        table(
            ["class", "collaborators", "values", "public"],
            [
                [one["name"], str(len(one["collaborators"])), str(one["values"]), "yes" if one["public"] else ""]
                for one in crowded
            ],
        ),
        f"Files of more than {LONG} lines: "
        + (", ".join(f"{file} ({n})" for file, n in sorted(lengths.items()) if n > LONG) or "none")
        + ".",
        NOTE,
    ]
    if options.files:
        files = sorted({file for epoch in epochs.values() for file in epoch})
        rows = [[file, *(str(len(epoch.get(file, []))) for epoch in epochs.values())] for file in files]
        parts.insert(4, table(["functions passed of", *epochs], rows))
    data = {"environment": facts, **found, "rooms": rooms, "lengths": lengths}
    publish(options.out, "walk", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
