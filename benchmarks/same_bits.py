"""Whether two commits compute the same, to the bit: they train in every mode side by side.

    python -m benchmarks.same_bits ../before [NOW_TREE] [--only NAME ...]

Each mode trains a small model for some epochs with the Shoal of both checkouts: the same seeds, the same kernels, the
same order of peers. After each step the model, and after each epoch the optimizer's state, is noted; one line says
whether all of it is equal, or where it first is not. Exit status 1 if a mode differs. `--only` has parts of names.
Both checkouts may be the same: what then differs hangs on chance, and must not be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.processes import ROOT, Worker, WorkerError, checkout, end_on_signals, tree_with
from benchmarks.report import table

PATIENCE = 120.0  # seconds for a case
VARIABLES = {"MKL_CBWR": "COMPATIBLE"}  # one kernel, wherever in memory a matrix begins
IDENTITIES, RANKS = 3, 2
KINDS = ("processes", "clusters")

Found = dict[str, str]


class Side:
    """The worker processes that train with one checkout.

    Args:
        kind: of `KINDS`.
        tree: where they run.
        folder: for their logs and keys.
        keys: files with identities, the same for both sides.
    """

    def __init__(self, kind: str, tree: Path, folder: Path, keys: Sequence[Path]) -> None:
        self._kind, self._tree, self._folder, self._keys = kind, tree, folder, keys
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        place = self._folder / f"{self._kind} {self._starts}"
        place.mkdir(parents=True)
        own = [Path(shutil.copy(key, place)) for key in self._keys]
        module = "benchmarks.workers.same_bits"
        given: list[list[str]] = [[]]
        if self._kind == "clusters":
            module += "_rank"
            told = [{"rank": rank, "size": RANKS, "folder": str(place)} for rank in (*range(RANKS), -1)]
            given = [[json.dumps(one)] for one in told]
        with contextlib.ExitStack() as stack:
            self._workers = []
            for number, arguments in enumerate(given):
                log = place / f"{number}.log"
                worker = Worker(sys.executable, module, arguments, log, self._tree, variables=VARIABLES)
                stack.callback(worker.stop, 5.0)
                self._workers.append(worker)
            if self._kind == "processes":
                self._workers[0].ask("open", PATIENCE, identities=[str(key) for key in own])
            else:
                addresses: list[str] = []
                for worker, key in zip(self._workers, own, strict=True):
                    opened = worker.ask("open", PATIENCE, initial_peers=addresses, identity=str(key))
                    addresses = addresses or opened
            self._stack = stack.pop_all()

    def names(self) -> list[str]:
        """Of its cases."""
        names: list[str] = self._workers[0].ask("names", PATIENCE)
        return names

    def begin(self, name: str) -> None:
        """Train that case."""
        for worker in self._workers:
            worker.send("case", name=name)

    def end(self) -> Found:
        """What its processes have noted. Raises WorkerError if one of them failed; then all are new."""
        found: Found = {}
        threads = ThreadPoolExecutor(len(self._workers))
        try:
            # As they come: where one fails, the others may wait for it.
            futures = [threads.submit(worker.receive, PATIENCE) for worker in self._workers]
            for future in as_completed(futures):
                future.result()
            for future in futures:
                found |= future.result()
        except WorkerError:
            self.close()
            self._start()
            raise
        finally:
            threads.shutdown()
        return found

    def close(self) -> None:
        """End them."""
        self._stack.close()


def difference(before: Found, now: Found) -> str:
    """Where two notes first differ; empty if they do not."""
    places = list(dict.fromkeys([*before, *now]))
    unlike = [place for place in places if before.get(place) != now.get(place)]
    if not unlike:
        return ""
    first = unlike[0]
    values = f"{before.get(first, 'not there')} before, {now.get(first, 'not there')} now"
    return f"{len(unlike)} of {len(places)}, first {first}: {values}"


def make_keys(folder: Path) -> list[Path]:
    """Identities for the peers."""
    keys = [folder / f"key {number}" for number in range(IDENTITIES)]
    worker = Worker(sys.executable, "benchmarks.workers.same_bits", [], folder / "keys.log")
    try:
        worker.ask("open", PATIENCE, identities=[str(key) for key in keys])
    finally:
        worker.stop(5.0)
    return keys


def compare(trees: dict[str, Path], only: Sequence[str], folder: Path) -> Iterator[tuple[str, int, str]]:
    """Of each case: its name, how many values are compared, and the difference."""
    keys = make_keys(folder)
    for kind in KINDS:
        with contextlib.ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name, tree in trees.items():
                sides[name] = Side(kind, tree, folder / name, keys)
                stack.callback(sides[name].close)
            names = sides["before"].names()
            for name in names if not only else [name for name in names if any(part in name for part in only)]:
                for side in sides.values():
                    side.begin(name)
                found: dict[str, Found] = {}
                failures: dict[str, str] = {}
                for which, side in sides.items():
                    try:
                        found[which] = side.end()
                    except WorkerError as error:
                        failures[which] = f"{which} failed: {error}"
                if failures:
                    yield name, 0, "; ".join(failures.values())
                else:
                    yield name, len(found["before"]), difference(found["before"], found["now"])


def main() -> None:
    """Parses the command line, trains, prints; exit code 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=checkout, help="a worktree of another commit")
    parser.add_argument("now", type=checkout, nargs="?", default=ROOT, help="a second one (default: this checkout)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases with this in their names")
    options = parser.parse_args()
    end_on_signals()
    began, rows, unlike = time.monotonic(), [], list[str]()
    with tempfile.TemporaryDirectory(prefix="shoal-same-bits-") as temporary:
        folder = Path(temporary)
        trees = {}
        for name, tree in (("before", options.before), ("now", options.now)):
            (folder / name).mkdir()
            trees[name] = tree_with(tree, folder / name)
        for name, count, found in compare(trees, options.only, folder):
            said = f"DIFFERS ({found})" if found else "equal"
            print(f"{name}: {said}", file=sys.stderr, flush=True)
            if found:
                unlike.append(f"{name}: {found}")
            rows.append([name, str(count), f"DIFFERS ({found.splitlines()[0]})" if found else "equal"])
    print(table(["mode", "values", f"{options.now} beside {options.before}"], rows))
    print(f"{len(rows) - len(unlike)} of {len(rows)} are equal; {time.monotonic() - began:.0f} s", *unlike, sep="\n")
    sys.exit(1 if unlike or not rows else 0)


if __name__ == "__main__":
    main()
