"""Many seeds of a simulated run with faults, on all cores: `python -m tests.simulation.sweep --seeds 10000 --resume
runs/sweep.jsonl`.

Each seed writes one line of JSON (`Verdict`). A sweep that was stopped goes on where it was. A seed that fails says how
to run it alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.one_seed import FIRST_WIDE, LINES, Verdict, as_row, try_seed

LIARS = ("never", "half", "always")


@dataclass(frozen=True, slots=True)
class Kind:
    """What all seeds of a sweep have in common.

    Attributes:
        lines: the lines of all; None: each draws its own.
        liar: which have a member that lies.
    """

    lines: str | None
    liar: str


def main() -> None:
    arguments = _parser().parse_args()
    kind = Kind(arguments.lines, arguments.liar)
    many = [*_seeds(arguments.first, arguments.seeds), *_seeds(arguments.first + FIRST_WIDE, arguments.wide)]
    wanted = [arguments.seed] if arguments.seed is not None else many
    file: Path | None = arguments.resume
    done = _done(file, kind) if file is not None else {}
    failed = [row for row in done.values() if row["verdict"] != "ok" and row["seed"] in wanted]
    for row in failed:
        _tell(row, kind)
    left = [seed for seed in wanted if seed not in done]
    began = time.monotonic()
    count = len(wanted) - len(left)
    for verdict in _verdicts(left, kind, arguments.jobs, arguments.log):
        row = as_row(verdict)
        count += 1
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps({"kind": dataclasses.asdict(kind)} | row) + "\n")
        if verdict.verdict != "ok":
            failed.append(row)
            _tell(row, kind)
        if sys.stderr.isatty() or count % 100 == 0:
            print(f"{count} of {len(wanted)} seeds, {len(failed)} failed", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(wanted)} seeds, {len(failed)} failed; {len(left)} of them in {minutes:.1f} minutes just now")
    if arguments.seed is not None and not failed:
        print(row)
    sys.exit(bool(failed))


def _seeds(first: int, count: int) -> range:
    return range(first, first + count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sweep", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    wide = f"so many more, from {FIRST_WIDE} on: a liar knows more lies there"
    parser.add_argument("--wide", type=int, default=0, help=wide)
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--log", action="store_true", help="with --seed: print what the peers log, with virtual times")
    parser.add_argument("--lines", choices=list(LINES), help="all with these; otherwise each seed draws them")
    parser.add_argument(
        "--liar",
        choices=LIARS,
        default="never",
        help="one more member lies: in all, half (and all that are wide) or no seeds",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--resume", type=Path, help="where each seed's line is kept; seeds that are there are not run")
    return parser


def _done(file: Path, kind: Kind) -> dict[int, dict[str, Any]]:
    """The seeds that were run before, and what became of them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text() if file.exists() else ""
    if text and not text.endswith("\n"):  # it was stopped in the middle of a line
        text = text[: text.rfind("\n") + 1]
        file.write_text(text)
    rows = [json.loads(line) for line in text.splitlines()]
    if any(row["kind"] != dataclasses.asdict(kind) for row in rows):
        sys.exit(f"{file} is of a sweep with other --lines or --liar: name another file, or delete it")
    return {row["seed"]: row for row in rows}


def _verdicts(seeds: list[int], kind: Kind, jobs: int, told: bool) -> Iterator[Verdict]:
    if min(jobs, len(seeds)) <= 1:
        yield from (_try(seed, kind, told) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        yield from pool.imap_unordered(partial(_try, kind=kind, told=False), seeds, chunksize=4)


def _try(seed: int, kind: Kind, told: bool) -> Verdict:
    liar = kind.liar == "always" or (kind.liar == "half" and (seed % 2 == 1 or seed >= FIRST_WIDE))
    return try_seed(seed, kind.lines, liar=liar, told=told)


def _prepare() -> None:
    import torch  # here, in the child: a child is to compute with one thread

    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is no garbage, and is not looked at after each seed


def _tell(row: dict[str, Any], kind: Kind) -> None:
    only = (f' --lines "{kind.lines}"' if kind.lines is not None else "") + f" --liar {kind.liar}"
    print(f"\nseed {row['seed']} ({row['members']} trainers, {row['lines']}) failed: {row['verdict']}\n{row['story']}")
    print(f"  again: python -m tests.simulation.sweep --seed {row['seed']}{only} --log", flush=True)


if __name__ == "__main__":
    main()
