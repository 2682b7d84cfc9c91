"""Sharded optimizer state on 2 ranks, gloo on loopback: DDP, torch's ZeRO, FSDP2 and Shoal.

    python -m benchmarks.sharding                   (all of it; about half an hour)
    python -m benchmarks.sharding --models small    (two minutes; also tiny, layers)

Each side runs in processes and a network namespace of its own (``unshare --net``, which needs root), so that memory and
the bytes of the interface are its own. "best" is `parameters_as_bucket_view`, a fused Adam, and DDP with
`gradient_as_bucket_view`. On the models of `IN_TURN` all sides live at the same time and take turns, round by round;
the others are too large for that: there only the `CLOSEST` do, and the other sides come one after the other. Figures
are of the slower or larger rank, CPU is the mean of the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table

SIDES = ("ddp", "ddp, best", "torch zero", "torch zero, best", "fsdp2", "shoal, ddp", "shoal")
MODELS = ("tiny", "layers", "small", "linears", "gpt2", "embedding")
IN_TURN = ("tiny", "layers", "small", "embedding")
CLOSEST = ("ddp, best", "torch zero, best", "shoal, ddp", "shoal")
STEPS_PER_ROUND = 3
ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

Outcome = dict[str, Any]


class Side:
    """The ranks of one side, alive and idle until told what to do."""

    def __init__(self, side: str, model: str, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[subprocess.Popen[str]] = []
        variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(ranks):
            arguments = [side, model, str(rank), str(ranks), self._folder.name]
            command = [sys.executable, "-m", "benchmarks.workers.sharding_rank", *arguments]
            if rank == 0:
                enter = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
            else:
                enter = ["nsenter", "--net", "--target", str(self._ranks[0].pid)]
            with Path(self._folder.name, f"{rank}.err").open("w") as errors:
                process = subprocess.Popen(
                    [*enter, *command],
                    cwd=ROOT,
                    env=variables,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            self._ranks.append(process)
            assert process.stdout is not None
            process.stdout.readline()  # it is in the namespace
        self.error = ""
        self.rounds: list[list[Outcome]] = []
        self.tell("warm")

    def tell(self, what: str) -> list[Outcome]:
        """Has all ranks do it; what each answers. None if one has failed: `error` says why."""
        if self.error:
            return []
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._ranks):
            assert process.stdout is not None
            if line := process.stdout.readline():
                answers.append(json.loads(line))
            else:
                lines = Path(self._folder.name, f"{rank}.err").read_text().splitlines()
                self.error = next((line for line in reversed(lines) if "Error" in line), "it ended without a word")
                return []
        return answers

    def outcome(self) -> Outcome:
        """What was measured; ends the ranks."""
        last = self.tell("finish")
        for process in self._ranks:
            process.communicate(timeout=60)
        self._folder.cleanup()
        if self.error:
            return {"error": self.error}
        total = sum(one["state"] for one in last)
        worst = {key: max(one.get(key, 0) for one in last) for key in last[0] if key not in ("pairs", "memory")}
        steps = [max(pair) for answers in self.rounds for pair in zip(*(one["steps"] for one in answers), strict=True)]
        pairs = last[0].get("pairs", [])
        join = [within[0] / without[0] for without, within in pairs]
        join_cpu = [within[1] / without[1] for without, within in pairs]
        return {
            **worst,
            "memory": {stage: max(one["memory"][stage] for one in last) for stage in last[0]["memory"]},
            "steps": steps,
            "step": statistics.median(steps),
            "cpu": statistics.median(one["cpu"] for answers in self.rounds for one in answers),
            "wire": statistics.median(one["wire"] for answers in self.rounds for one in answers),
            "join": _added(join),
            "join ms": statistics.median((within[0] - without[0]) * 1e3 for without, within in pairs)
            if pairs
            else None,
            "join cpu": _added(join_cpu),
            "join of pairs": join,
            "imbalance": worst["state"] * len(last) / total if total else 1.0,
        }


def _added(ratios: list[float]) -> tuple[float, float] | None:
    """What is added in the median pair, and the standard error of that."""
    return (statistics.median(ratios) - 1, 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5) if ratios else None


def measure(sides: list[str], model: str, ranks: int, rounds: int) -> dict[str, Outcome]:
    """Some sides, in turn."""
    alive = {side: Side(side, model, ranks) for side in sides}
    for _ in range(rounds):
        for one in alive.values():
            one.rounds.append(one.tell(f"step {STEPS_PER_ROUND}"))
    return {side: one.outcome() for side, one in alive.items()}


def report(kept: dict[str, Any]) -> str:
    """All models, in markdown."""
    parts = ["# Sharded optimizer state: 2 ranks, gloo on loopback"]
    head = ["side", "step ms", "CPU ms", "sent, models", "state MB", "largest share x ranks", "peak MB"]
    head += ["Join adds", "of CPU", "ms", "consolidate s", "load s"]
    for model, one in kept.items():
        rows = []
        for side, it in one["sides"].items():
            if "error" in it:
                rows.append([f"{side}: {it['error']}", *[""] * 11])
                continue
            join = ["{:+.1%} ± {:.1%}".format(*it[key]) if it[key] else "" for key in ("join", "join cpu")]
            sizes = [number(it["state"] / 1e6, 0), number(it["imbalance"], 3), number(it["peak"] / 1e6, 0)]
            times = [number(it["step"] * 1e3, 0), number(it["cpu"] * 1e3, 0), number(it["wire"] / it["model"])]
            rows.append(
                [
                    side,
                    *times,
                    *sizes,
                    *join,
                    number(it.get("join ms")),
                    number(it.get("consolidate")),
                    number(it.get("load")),
                ]
            )
        parts += [
            f"## {model}",
            describe(one["environment"]) + ", in turn: " + ("all sides" if model in IN_TURN else "; ".join(CLOSEST)),
            table(head, rows),
            figure_table(figures(one["sides"])),
            *memory_lines(one["sides"]),
        ]
    parts.append("`python -m benchmarks.sharding` makes this again. Step, CPU and bytes are per rank and step.")
    return "\n\n".join(parts)


def memory_lines(outcomes: dict[str, Outcome]) -> list[str]:
    """Where the memory goes, in the lines of the example of PyTorch 1.10; of the process where there is no GPU."""
    parts = []
    for side, outcome in outcomes.items():
        if memory := outcome.get("memory"):
            lines = [f"Max memory allocated {stage}: {nbytes / 2**20:.1f}MB" for stage, nbytes in memory.items()]
            parts.append("\n".join([f"{side}:", "```text", *lines, "```"]))
    return parts


def figures(outcomes: dict[str, Outcome]) -> list[Figure]:
    """Shoal against the others, with what the project promises."""
    ours = outcomes.get("shoal", {"error": ""})
    if "error" in ours:
        return []
    found = []
    for side, key, bound in (
        ("torch zero", "wire", "<= 0.67"),
        ("torch zero", "step", "<= 0.7"),
        ("torch zero, best", "step", "<= 0.95"),
        ("ddp, best", "step", "<= 1"),
        ("torch zero, best", "cpu", ""),
        ("ddp, best", "cpu", ""),
        ("torch zero, best", "peak", "<= 1"),
        ("torch zero", "consolidate", "<= 0.05"),
    ):
        theirs = outcomes.get(side, {"error": ""})
        if "error" not in theirs:
            found.append(Figure(f"{key}, Shoal / {side}", ours[key] / theirs[key], bound))
    beside = outcomes.get("shoal, ddp", {"error": ""})
    torchs = outcomes.get("torch zero, best", {"error": ""})
    if "error" not in beside and "error" not in torchs:
        found.append(Figure("ms that Join adds beside DDP, Shoal", beside["join ms"], ""))
        found.append(Figure("ms that Join adds beside DDP, torch", torchs["join ms"], ""))
    found.append(Figure("largest share of state x ranks, Shoal", ours["imbalance"], "<= 1.01"))
    found.append(Figure("a step in Join / without, Shoal", 1 + ours["join"][0], "<= 1.01"))
    found.append(Figure("CPU of a step in Join / without, Shoal", 1 + ours["join cpu"][0], "<= 1.01"))
    return found


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    file = RESULTS / "sharding.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    for model in arguments.models:
        facts = environment()
        in_turn = [side for side in arguments.sides if model in IN_TURN or side in CLOSEST]
        together = [in_turn, *([side] for side in arguments.sides if side not in in_turn)]
        outcomes: dict[str, Outcome] = {}
        for sides in together:
            outcomes |= measure(sides, model, arguments.ranks, arguments.rounds)
        kept[model] = {"environment": facts, "sides": {side: outcomes[side] for side in arguments.sides}}
        publish(RESULTS, "sharding", report(kept), kept)


if __name__ == "__main__":
    main()
