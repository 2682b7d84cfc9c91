"""What outer optimizers save, and what they cost: bytes, waiting, and loss after equal samples.

    python -m benchmarks.outer [--only bytes overlap loss] [--seeds 3]

*bytes*: what a peer sends per inner step, in each mode, of the synchronous mode's. *overlap*: inner steps per second on
a line on which a round takes five of them. *loss*: the demo's GPT, trained on from one warm start with equal samples in
each mode, by four peers; the inner learning rates are tuned once for synchronous and once for outer optimizers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, end_on_signals
from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from benchmarks.workers.outer_trainer import BATCH

RESULTS = Path(__file__).resolve().parent / "results"
PEERS, INNER_STEPS, CONTEXT = 4, 32, 64
WARM_EPOCHS, WARM_SAMPLES = 300, 128
ROUNDS = 24  # of 32 inner steps
RATES = (3.75e-4, 7.5e-4, 1.5e-3, 3e-3)
SYNCHRONOUS_SAMPLES = PEERS * BATCH  # one step of each peer
OUTER = ("DiLoCo", "DiLoCo, 4 bits", "DiLoCo, top-k")
ELEMENTS, STEP_SECONDS, STEPS_OF_ROUND = 500_000, 0.1, 5
OVERLAP_STEPS = 16  # between rounds; without overlap a peer makes at most 16 of 21 steps
TRIED: dict[str, dict[str, Any]] = {  # to bring the loss of DiLoCo to that of synchronous averaging
    "outer rate 0.4": {"nesterov": (0.4, 0.9)},
    "outer rate 1.0": {"nesterov": (1.0, 0.9)},
    "momentum 0.8": {"nesterov": (0.7, 0.8)},
    "momentum 0.0, outer rate 1.0": {"nesterov": (1.0, 0.0)},
    "H = 8": {"inner_steps": 8},
}

NOTE = """\
Four peers on 2 cores, each a process with one thread. The *loss* is that of held-out text, in nats per byte, after
equal samples from one warm start; for outer optimizers it is the anchor's. Samples are drawn anew for each seed; *±* is
the standard error of the mean. *MB* are what one peer has sent."""


def peers(folder: Path, count: int = PEERS, **given: Any) -> list[dict[str, Any]]:
    """A run of so many peers; what each has said at its end."""
    defaults = {
        "samples": None, "in_step": False, "inner_steps": None, "weights": "", "until": None, "seconds": None,
        "pause": 0.0, "upload": None, "elements": None, "save": "", "rate": 1e-3, "nesterov": (0.7, 0.9),
        "peers": count, "mode": "synchronous", "seed": 0,
    }  # fmt: skip
    options = defaults | given
    started: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    try:
        for rank in range(count):
            own = options | {"seed": 1000 * options["seed"] + rank, "initial_peers": addresses}
            own["save"] = options["save"] if rank == 0 else ""
            command = [sys.executable, "-m", "benchmarks.workers.outer_trainer", json.dumps(own)]
            with (folder / f"{rank}.log").open("w") as log:
                environment_of = os.environ | {"OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=environment_of
                )
            started.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                sys.exit(f"a peer ended at once: {(folder / f'{rank}.log').read_text()[-2000:]}")
            addresses = addresses or json.loads(line)["addresses"]
        said = []
        for rank, process in enumerate(started):
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
            if process.wait() or not lines:
                sys.exit(f"a peer has failed: {(folder / f'{rank}.log').read_text()[-2000:]}")
            said.append(json.loads(lines[-1]))
        return said
    finally:
        for process in started:
            process.kill()
            process.communicate()


def targets(mode: str) -> dict[str, Any]:
    """What ends an epoch of that mode."""
    if mode == "synchronous":
        return {"samples": SYNCHRONOUS_SAMPLES, "in_step": True}
    if mode == "local updates":
        return {"samples": INNER_STEPS * SYNCHRONOUS_SAMPLES}
    return {"inner_steps": INNER_STEPS}


def measure_bytes(folder: Path) -> tuple[list[list[str]], list[Figure]]:
    """What one peer sends for each of its inner steps."""
    until = 6 * INNER_STEPS * SYNCHRONOUS_SAMPLES
    found: dict[str, float] = {}
    for mode in ("synchronous", *OUTER):
        said = peers(folder, mode=mode, until=until, elements=ELEMENTS, pause=0.01, **targets(mode))
        found[mode] = statistics.mean(one["sent"] / one["steps"] for one in said)
    base = found["synchronous"]
    rows = [[mode, number(sent / 1000, 1), number(base / sent, 1)] for mode, sent in found.items()]
    bounds = {"DiLoCo": INNER_STEPS / 1.02, "DiLoCo, 4 bits": INNER_STEPS * 7.7 / 1.05}
    figures = [
        Figure(f"bytes per inner step of synchronous, of {mode}", base / found[mode], f">= {bound:.2f}")
        for mode, bound in bounds.items()
    ]
    # Half of what a round sends are results; sparse parts have them in 4 bits.
    sparse_parts = (found["DiLoCo, top-k"] - found["DiLoCo, 4 bits"] / 2) / (found["DiLoCo"] / 2)
    figures.append(Figure("bytes of float32 parts, of top-k's", 1 / sparse_parts, ">= 130"))
    return rows, figures


def measure_overlap(folder: Path) -> tuple[list[list[str]], list[Figure]]:
    """Inner steps per second where a round takes five inner steps' time."""
    upload = ELEMENTS * 4 / (STEPS_OF_ROUND * STEP_SECONDS)  # two peers send each other half of it twice
    fixed: dict[str, Any] = {
        "elements": ELEMENTS,
        "pause": STEP_SECONDS,
        "inner_steps": OVERLAP_STEPS,
        "seconds": 40.0,
        "peers": 1,
    }
    alone = peers(folder, 1, mode="DiLoCo", **fixed)[0]
    rows, figures = [], []
    for mode, bound in (("DiLoCo, overlapped", ">= 0.95"), ("DiLoCo", "<= 0.8")):
        said = peers(folder, 2, mode=mode, upload=upload, **(fixed | {"peers": 2}))
        rate = statistics.mean(one["steps"] / one["seconds"] for one in said)
        of_alone = rate / (alone["steps"] / alone["seconds"])
        rows.append([mode, number(rate, 2), number(of_alone, 3)])
        figures.append(Figure(f"inner steps per second of {mode}, of one peer alone", of_alone, bound))
    return rows, figures


def measure_loss(folder: Path, seeds: int) -> tuple[list[list[str]], list[Figure], dict[str, Any]]:
    """Loss after equal samples, in each mode."""
    warm = str(folder / "warm.pt")
    said = peers(
        folder, samples=WARM_SAMPLES, until=WARM_EPOCHS * WARM_SAMPLES, rate=3e-3, save=warm, mode="synchronous"
    )
    print(f"warm start: loss {said[0]['loss']:.3f}", file=sys.stderr, flush=True)
    until = ROUNDS * INNER_STEPS * SYNCHRONOUS_SAMPLES
    run: dict[str, Any] = {"weights": warm, "until": until}
    best: dict[str, float] = {}
    tuned: dict[str, dict[float, float]] = {}
    for mode in ("synchronous", "DiLoCo"):
        tuned[mode] = {
            rate: peers(folder, mode=mode, rate=rate, seed=99, **run, **targets(mode))[0]["loss"] for rate in RATES
        }
        best[mode] = min(tuned[mode], key=tuned[mode].__getitem__)
        print(f"{mode}: {tuned[mode]}", file=sys.stderr, flush=True)
    rows: list[list[str]] = []
    losses: dict[str, list[float]] = {}
    raw: dict[str, list[dict[str, Any]]] = {}
    for mode in ("synchronous", *OUTER, "local updates"):
        rate = best["synchronous" if mode == "synchronous" else "DiLoCo"]
        raw[mode] = []
        for seed in range(seeds):
            began = time.monotonic()
            said = peers(folder, mode=mode, rate=rate, seed=seed, **run, **targets(mode))
            raw[mode].append(said[0] | {"minutes": (time.monotonic() - began) / 60})
            print(f"{mode}, seed {seed}: loss {said[0]['loss']:.4f}", file=sys.stderr, flush=True)
        losses[mode] = [one["loss"] for one in raw[mode]]
        error = statistics.stdev(losses[mode]) / math.sqrt(seeds) if seeds > 1 else float("nan")
        megabytes = statistics.mean(one["sent"] for one in raw[mode]) / 1e6
        minutes = statistics.mean(one["minutes"] for one in raw[mode])
        tokens = number(until * CONTEXT / 1e6, 2)
        loss = f"{statistics.mean(losses[mode]):.4f} ± {error:.4f}"
        rows.append([mode, f"{rate:g}", loss, tokens, number(megabytes, 1), number(minutes, 2)])
    tried: dict[str, float] = {}
    for name, changed in TRIED.items():
        tried[name] = peers(folder, mode="DiLoCo", rate=best["DiLoCo"], **run, **(targets("DiLoCo") | changed))[0][
            "loss"
        ]
        print(f"DiLoCo, {name}: {tried[name]:.4f}", file=sys.stderr, flush=True)
        rows.append([f"DiLoCo, {name} (one seed)", f"{best['DiLoCo']:g}", number(tried[name], 4), "", "", ""])
    mean = {mode: statistics.mean(values) for mode, values in losses.items()}
    figures = [
        Figure("loss of DiLoCo in 4 bits, of DiLoCo", mean["DiLoCo, 4 bits"] / mean["DiLoCo"], "<= 1.005"),
        Figure("loss of DiLoCo, of synchronous", mean["DiLoCo"] / mean["synchronous"], ""),
    ]
    return rows, figures, {"tuned": tuned, "runs": raw, "tried": tried}


def main() -> None:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("bytes", "overlap", "loss")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", type=int, default=3, help="of the batches, for each mode of loss (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for outer.md and outer.json")
    options = parser.parse_args()
    end_on_signals()
    facts = environment()
    text = ["# Outer optimizers", describe(facts)]
    figures: list[Figure] = []
    data: dict[str, Any] = {"environment": facts}
    with tempfile.TemporaryDirectory(prefix="shoal-outer-") as temporary:
        folder = Path(temporary)
        if "bytes" in options.only:
            rows, found = measure_bytes(folder)
            text += [table(["mode", "kB sent per inner step", "synchronous has so many times that"], rows)]
            figures += found
        if "overlap" in options.only:
            rows, found = measure_overlap(folder)
            text += [table(["mode", "inner steps per second", "of one peer alone"], rows)]
            figures += found
        if "loss" in options.only:
            rows, found, data["loss"] = measure_loss(folder, options.seeds)
            head = ["mode", "inner rate", "held-out loss", "million tokens", "MB sent", "minutes"]
            text += [table(head, rows), NOTE]
            figures += found
    data["figures"] = [asdict(figure) | {"met": figure.met} for figure in figures]
    publish(options.out, "outer", "\n\n".join([*text, figure_table(figures)]), data)


if __name__ == "__main__":
    main()
