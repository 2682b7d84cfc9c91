"""How much of Shoal one epoch passes, and how large that is: functions, files, code lines, circles, constructors.

    python -m benchmarks.walk [--tree WORKTREE] [--files]

Two peers in one process train a tiny model over loopback. After the start, every function of `shoal/` is recorded that
is called in any thread during one epoch of both: from the first step to the commit that both have applied. The rest is
read from the source: see `benchmarks.structure`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, checkout, tree_with
from benchmarks.report import describe, environment, publish, table

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT = 600.0  # seconds
REBUILT = ("swarm", "transfer", "averaging", "optim")  # rooms of issue 15; before it there were only the last two
LONG = 400  # lines of a file
COLLABORATORS = 6
LISTED = 12  # constructors

NOTE = """\
*Passed*: called during the epoch, in the trainers' threads, on the reactor, or in a thread of its own; coroutines that
were resumed count too, comprehensions do not. Of the epochs that were recorded it is the one with the median number of
functions. *Code lines*: without docstrings, comments and blank lines. *Circle*: modules that import each other,
imports under TYPE_CHECKING counted. *Collaborator*: a parameter of a constructor whose annotation names more than
values (numbers, text, bytes, tensors, containers of these, enums, immutable records of these)."""


def measure(tree: Path, epochs: int) -> dict[str, Any]:
    """Runs `benchmarks.workers.walk` with the Shoal of a checkout; what it prints."""
    with tempfile.TemporaryDirectory(prefix="shoal-walk-") as folder:
        there = tree_with(tree, Path(folder))
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.workers.walk", "--epochs", str(epochs)],
            cwd=there,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(there), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def median_epoch(epochs: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """The epoch with the median number of functions."""
    return sorted(epochs, key=lambda epoch: sum(map(len, epoch.values())))[len(epochs) // 2]


def room(file: str) -> str:
    """The top folder of a file of Shoal."""
    return file.partition("/")[0] if "/" in file else "-"


def room_rows(passed: dict[str, list[str]], lines: dict[str, int]) -> list[list[str]]:
    """Of each room: files, code lines, what the epoch passes of them."""
    rows = []
    rooms = sorted({room(file) for file in lines})
    for names, label in [*(((name,), name) for name in rooms), (REBUILT, " + ".join(REBUILT)), (tuple(rooms), "all")]:
        own = [file for file in lines if room(file) in names]
        walked = [file for file in own if file in passed]
        functions = sum(len(passed[file]) for file in walked)
        rows.append([label, str(len(own)), str(sum(lines[file] for file in own)), str(len(walked)), str(functions)])
    return rows


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=checkout, default=ROOT, metavar="PATH", help="a checkout of another commit")
    parser.add_argument("--epochs", type=int, default=5, help="how many are recorded, each by itself (default: 5)")
    parser.add_argument("--files", action="store_true", help="list the files that are passed, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for walk.md and walk.json")
    options = parser.parse_args()
    facts = environment() | {"tree": options.tree.name}
    found = measure(options.tree, options.epochs)
    structure = found["structure"]
    passed, lines = median_epoch(found["epochs"]), structure["code_lines"]
    counts = sorted(sum(map(len, epoch.values())) for epoch in found["epochs"])
    crowded = structure["constructors"][:LISTED]
    too_many = [one for one in structure["constructors"] if len(one["collaborators"]) > COLLABORATORS]
    package = options.tree / "shoal"
    lengths = {str(path.relative_to(package)): len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    parts = [
        "# What one epoch of two peers passes",
        describe(facts),
        table(["room", "files", "code lines", "files passed", "functions passed"], room_rows(passed, lines)),
        f"Functions passed in each recorded epoch: {', '.join(map(str, counts))}.",
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
        rows = [[file, str(len(functions))] for file, functions in sorted(passed.items())]
        parts.insert(4, table(["file", "functions passed"], rows))
    data = {"environment": facts, **found, "lengths": lengths}
    publish(options.out, "walk", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
