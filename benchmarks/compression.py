"""Encodes and decodes with every codec, in one thread: Shoal and hivemind, in turn in one run.

python -m benchmarks.compression --hivemind-python .venv-hivemind/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import Worker, end_on_signals
from benchmarks.report import Figure

CODECS = (
    "NoCompression",
    "Float16Compression",
    "ScaledFloat16Compression",
    "Uniform8BitQuantization",
    "Quantile8BitQuantization",
    "BlockwiseQuantization",
)
LOSSY = CODECS[1:]
OURS = ("Blockwise4Bit", "TopK")  # hivemind has none like them
VALUES = ("normal", "heavy", "sparse", "shifted")
CHUNK = 1 << 18  # elements: 1 MiB of float32
TIMEOUT = 300.0  # seconds for one answer
RESULTS = Path(__file__).resolve().parent / "results"

Measured = dict[str, float]
Times = dict[tuple[str, int, str], Measured]  # codec, elements, side
Errors = dict[tuple[str, str, str], Measured]  # codec, values, side


def time_all(sides: dict[str, Worker], sizes: list[int], rounds: int) -> Times:
    """Medians over the rounds of what each side measures in its turn."""
    times: Times = {}
    for codec in CODECS + OURS:
        for elements in sizes:
            print(f"{codec}: {elements} elements", file=sys.stderr, flush=True)
            turns: dict[str, list[Measured]] = {side: [] for side in sides if has(side, codec)}
            for _ in range(rounds):
                for side in turns:
                    worker = sides[side]
                    repeats = 15 if elements <= CHUNK else 3
                    turns[side].append(
                        worker.ask("measure", TIMEOUT, codec=codec, values="normal", elements=elements, repeats=repeats)
                    )
            for side, measured in turns.items():
                medians = {what: report.median(one[what] for one in measured) for what in ("encode", "decode")}
                times[codec, elements, side] = {what: value or 0.0 for what, value in medians.items()}
    return times


def has(side: str, codec: str) -> bool:
    """Whether that side has the codec."""
    return side == "shoal" or codec not in OURS


def time_table(times: Times, sizes: list[int], sides: dict[str, Worker]) -> str:
    """MB of float32 per second."""
    rows = []
    for codec in CODECS + OURS:
        compares = "hivemind" in sides and has("hivemind", codec)
        for elements in sizes:
            row = [f"{codec}, {elements:,}"]
            for what in ("encode", "decode"):
                measured = [times.get((codec, elements, side)) for side in sides]
                row += [report.number(None if one is None else elements * 4e-6 / one[what], 0) for one in measured]
                row.append(report.number(ratio(times, codec, elements, (what,)) if compares else None))
            row.append(report.number(ratio(times, codec, elements, ("encode", "decode")) if compares else None))
            rows.append(row)
    head = ["codec, elements"]
    for what in ("encode", "decode"):
        head += [f"{what} {side}" for side in sides] + ["ratio"]
    return report.table([*head, "both, ratio"], rows)


def ratio(times: Times, codec: str, elements: int, parts: tuple[str, ...]) -> float:
    """How many times as fast as hivemind Shoal is."""
    hivemind, shoal = (sum(times[codec, elements, side][part] for part in parts) for side in ("hivemind", "shoal"))
    return hivemind / shoal


def error_table(errors: Errors, sides: dict[str, Worker]) -> str:
    """What each codec loses."""

    def of(what: str, style: str, codec: str, values: str) -> list[str]:
        measured = [errors.get((codec, values, side)) for side in sides]
        return [report.number(None) if one is None else format(one[what], style) for one in measured]

    rows = [
        [
            f"{codec}, {values}",
            *of("mean_square", ".2e", codec, values),
            *of("largest", ".2g", codec, values),
            *of("bytes_per_element", ".4f", codec, values),
        ]
        for codec in LOSSY + OURS
        for values in VALUES
    ]
    head = [f"{what} {side}" for what in ("mean square error", "largest error", "bytes an element") for side in sides]
    return report.table(["codec, values", *head], rows)


def promises(times: Times, errors: Errors) -> list[Figure]:
    """What the project promises on 1 MiB chunks."""
    figures = []
    for codec in CODECS:
        for name, parts in (("encode", ("encode",)), ("decode", ("decode",)), ("both", ("encode", "decode"))):
            figures.append(Figure(f"{codec}: {name}, times as fast", ratio(times, codec, CHUNK, parts), ">= 2"))
    for codec in LOSSY:
        ours, theirs = errors[codec, "normal", "shoal"], errors[codec, "normal", "hivemind"]
        for what in ("mean_square", "largest"):
            name = f"{codec}: {what.replace('_', ' ')} error of normal values, by hivemind's"
            figures.append(Figure(name, ours[what] / theirs[what], "<= 1.01" if what == "mean_square" else "<= 1.1"))
    return figures


NOTE = """\
MB of float32 a second, medians, one thread, normal values. *Decode* is decoding and adding to a sum in float32, as a
reducer does. Shoal encodes chunks of 2**18 elements, as in a round; hivemind is given all elements at once. hivemind's
`BlockwiseQuantization` is that of bitsandbytes, which starts threads of its own to encode.

Where encoding to 16 bits spends its time, µs for 1 MiB, the least of 800 calls on 2026-11-21 beside other work on the
machine. A kernel that reads 1 MiB and writes it elsewhere (clamp, subtract) takes 21 to 25, one in place 13, extremes
of rows 14 each, converting to float16 15. `Float16Compression` takes 34 (42 when it always clamped), hivemind 79: it
converts, adds the result up in 12, and clamps only if the sum is not finite. That also happens without an overflow,
where the mean of so large a chunk is beyond ±0.25, and then it takes 75. `ScaledFloat16Compression` takes 124 to 137
(139 to 149 before), hivemind, with one mean and deviation for all elements, 154 to 173. Alone: extremes 28, subtracting
and scaling 33, converting 15, the mean of a sample 15, scales 9, what does not depend on the number of elements 14.

torch has a kernel that does more at once: `native_group_norm` takes mean and deviation of all blocks and normalises
them in 56. A trial with it took 92 where hivemind took 164 to 172: 1.8 times as fast. It is not used. It misses the
promise too (normalising and converting alone are 75); its sums depend on the width of the vector instructions (other
bytes with `ATEN_CPU_CAPABILITY=default` than with `avx2`), so that unlike machines with the same state would offer
manifests with unlike digests; and blocks that are constant, or whose squares leave float32's range, would need the
present way beside it."""
ERROR_NOTE = f"""\
{CHUNK} elements. *Heavy*: Student's t with 3 degrees of freedom. *Sparse*: one in 20 is not zero. *Shifted*: mean 1,
deviation 0.01. The bounds of the promises leave 1% and 10% for chance: the two sides round elsewhere."""


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", metavar="PATH", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (default: 7)")
    parser.add_argument("--elements", type=int, default=10_000_000, help="of the long vector (default: 10 million)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for compression.md and compression.json")
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    pythons = {"shoal": sys.executable} | ({"hivemind": options.hivemind_python} if options.hivemind_python else {})
    sizes = [CHUNK, options.elements]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as logs, contextlib.ExitStack() as stack:
        sides = {
            side: Worker(python, "benchmarks.workers.codecs", [side], Path(logs) / f"{side}.log")
            for side, python in pythons.items()
        }
        for worker in sides.values():
            stack.callback(worker.stop, patience=1)
        times = time_all(sides, sizes, options.rounds)
        errors: Errors = {
            (codec, values, side): worker.ask("errors", TIMEOUT, codec=codec, values=values, elements=CHUNK)
            for codec in LOSSY + OURS
            for values in VALUES
            for side, worker in sides.items()
            if has(side, codec)
        }
        parts: list[str] = [
            "# Codecs",
            report.describe(facts | {"rounds": options.rounds}),
            time_table(times, sizes, sides),
            NOTE,
            error_table(errors, sides),
            ERROR_NOTE,
        ]
    figures = promises(times, errors) if "hivemind" in pythons else []
    if figures:
        parts.append(report.figure_table(figures))
    data: dict[str, Any] = {
        "environment": facts,
        "options": {"rounds": options.rounds, "elements": options.elements},
        "seconds": [dict(zip(("codec", "elements", "side"), key, strict=True)) | one for key, one in times.items()],
        "errors": [dict(zip(("codec", "values", "side"), key, strict=True)) | one for key, one in errors.items()],
        "figures": [{"name": f.name, "value": f.value, "bound": f.bound, "met": f.met} for f in figures],
    }
    report.publish(options.out, "compression", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
