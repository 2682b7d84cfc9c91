"""Tries the optimizers of other people in every world of Shoal, and prints a table: `make optimizers`.

    python -m tests.zoo --only hb. po.Lion --worlds newcomer

What was found is kept in a file, and a run that was stopped goes on there. What was found of other code does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from blake3 import blake3

import shoal
from tests.zoo.cases import ALL_WORLDS, run
from tests.zoo.classes import Entry, entries
from tests.zoo.outcome import Kind, Outcome
from tests.zoo.table import counts, table, write


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="BEGINNING", help="the classes, by how they begin")
    parser.add_argument("--worlds", nargs="+", default=ALL_WORLDS, choices=ALL_WORLDS)
    parser.add_argument("--jobs", type=int, default=3, help="the number of cases at a time")
    parser.add_argument("--results", type=Path, default=Path("runs/optimizers.jsonl"), help="the file of the outcomes")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    parser.add_argument("--again", nargs="*", default=[], choices=[one.name for one in Kind], metavar="KIND",
                        help="run cases again that had these outcomes: WRONG, REFUSED, …")  # fmt: skip
    given = parser.parse_args()

    everything = entries()
    import_module("torch._dynamo")  # the first step would import it, in each process anew
    gc.collect()
    gc.freeze()  # what was imported stays: whoever looks for the owners of a tensor need not look through it
    chosen = [one for one in everything if one.name.startswith(tuple(given.only))]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], Outcome] = {}
    code = code_under_test()
    if given.results.exists():
        for line in given.results.read_text().splitlines():
            wire = json.loads(line)
            if wire["code"] == code:
                found[wire["name"], wire["world"]] = Outcome.from_wire(wire)
    cases = [
        (one, world)
        for world in given.worlds
        for one in chosen
        if (one.name, world) not in found or found[one.name, world].kind.name in given.again
    ]
    began = time.monotonic()
    print(f"{len(cases)} cases, with {Path(shoal.__file__).parent}", file=sys.stderr, flush=True)

    def try_them(cases: list[tuple[Entry, str]], jobs: int) -> None:
        with given.results.open("a") as file:
            for number, (entry, world, outcome) in enumerate(run(cases, jobs), 1):
                found[entry.name, world] = outcome
                case = {"name": entry.name, "world": world, "code": code}
                file.write(json.dumps(case | outcome.to_wire()) + "\n")
                file.flush()
                if outcome.kind not in (Kind.EQUAL, Kind.CLOSE) or sys.stderr.isatty():
                    place = f"[{number}/{len(cases)}, {time.monotonic() - began:.0f} s] {world} {entry.name}"
                    print(f"{place}: {outcome.kind.value} {outcome.why[:300]}", file=sys.stderr, flush=True)

    try_them(cases, given.jobs)
    # A busy machine may keep a newcomer from a round: then it downloads once more. Those cases are tried again, alone.
    try_them([case for case in cases if (case[0].name, case[1]) in found and missed(found[case[0].name, case[1]])], 1)
    names = [one.name for one in chosen]
    shown = {case: outcome for case, outcome in found.items() if case[0] in names and case[1] in given.worlds}
    block = f"{counts(shown, given.worlds)}\n\n{table(shown, names, given.worlds)}"
    print(block)
    if given.write is not None:
        write(given.write, block)
    return any(outcome.kind is Kind.WRONG for outcome in shown.values())


def missed(outcome: Outcome) -> bool:
    """Whether all that is wrong is that a newcomer was not in each round."""
    return outcome.kind is Kind.WRONG and outcome.why.startswith("common epochs") and "unequal []" in outcome.why


def code_under_test() -> str:
    """The hash of Shoal's code, and of these tests."""
    folders = Path(shoal.__file__).parent, Path(__file__).parent
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return blake3(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
