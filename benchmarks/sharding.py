"""Sharded optimizer state on 2 ranks, gloo on loopback: DDP, torch's ZeRO, FSDP2 and Shoal, one after the other.

    python -m benchmarks.sharding                   (all of it; about half an hour)
    python -m benchmarks.sharding --models small    (a minute)

Each side runs in processes and a network namespace of its own (``unshare --net``, which needs root), so that memory and
the bytes of the interface are its own. "best" is `parameters_as_bucket_view`, a fused Adam, and DDP with
`gradient_as_bucket_view`. Figures are of the slower or larger rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIDES = ("ddp", "ddp, best", "torch zero", "torch zero, best", "fsdp2", "shoal")
MODELS = ("small", "linears", "gpt2", "embedding")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "sharding.json"
TIMEOUT = 600.0

Outcome = dict[str, Any]


def measure(side: str, model: str, ranks: int, steps: int) -> Outcome:
    """All ranks of one side; what went wrong, under ``error``, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        commands = " & ".join(
            f"{sys.executable} -m benchmarks.workers.sharding_rank '{side}' {model} {rank} {ranks} {folder} {steps}"
            for rank in range(ranks)
        )
        script = f"ip link set lo up; export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo; {commands}; wait"
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT
        )
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if not all(file.exists() for file in files):
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"error": lines[-1] if lines else done.stderr[-300:]}
        by_rank: list[Outcome] = [json.loads(file.read_text()) for file in files]
    total = sum(outcome["state"] for outcome in by_rank)
    worst = {
        key: max(outcome.get(key, 0) for outcome in by_rank) for key in by_rank[0] if key not in ("steps", "model")
    }
    return {
        **worst,
        "model": by_rank[0]["model"],
        "steps": by_rank[0]["steps"],
        "imbalance": worst["state"] * ranks / total if total else 1.0,
    }


def table(model: str, outcomes: dict[str, Outcome]) -> str:
    """One model, in markdown."""
    lines = [
        f"### {model}",
        "| side | step, ms | sent per rank and step, model sizes | state per rank, MB | largest share times ranks "
        "| peak, MB | Join adds | consolidate, s | load, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side, one in outcomes.items():
        if "error" in one:
            lines.append(f"| {side} | {one['error']} | | | | | | | |")
            continue
        join = f"{one['with join'] / one['without join'] - 1:+.1%}" if "with join" in one else ""
        saved = (f"{one['consolidate']:.2f}", f"{one['load']:.2f}") if "consolidate" in one else ("", "")
        lines.append(
            f"| {side} | {one['step'] * 1e3:.0f} | {one['wire'] / one['model']:.2f} | {one['state'] / 1e6:.0f} "
            f"| {one['imbalance']:.3f} | {one['peak'] / 1e6:.0f} | {join} | {' | '.join(saved)} |"
        )
    return "\n".join(lines)


def ratios(outcomes: dict[str, Outcome]) -> list[str]:
    """Shoal against the others, with what the project promises."""
    ours = outcomes.get("shoal", {"error": ""})
    if "error" in ours:
        return []
    found = []
    for side, key, bound in (
        ("torch zero", "wire", 0.67),
        ("torch zero", "step", 0.7),
        ("torch zero, best", "step", 0.95),
        ("ddp, best", "step", 1.0),
        ("torch zero, best", "peak", 1.0),
        ("torch zero", "consolidate", 0.05),
    ):
        theirs = outcomes.get(side, {"error": ""})
        if "error" not in theirs:
            value = ours[key] / theirs[key]
            found.append(f"{'met' if value <= bound else 'NOT MET'}: {key}, Shoal / {side}: {value:.3f} (<= {bound})")
    return found


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    kept: dict[str, dict[str, Outcome]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model in arguments.models:
        outcomes = {side: measure(side, model, arguments.ranks, arguments.steps) for side in arguments.sides}
        print(table(model, outcomes), *ratios(outcomes), "", sep="\n", flush=True)
        kept.setdefault(model, {}).update(outcomes)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
