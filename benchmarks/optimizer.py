"""Trains with 2 and 4 peers in every mode: `shoal.Optimizer` and `hivemind.Optimizer` in turn, and one plain process.

    python -m benchmarks.optimizer --hivemind-python .venv-hivemind/bin/python        (or: make bench-optimizer)
    python -m benchmarks.optimizer --before ../before --models 6.3M --steps 60 --modes synchronous --compute 3 --turns 5

What an epoch costs beyond the trainers' compute is what is compared. The machine has fewer cores than peers have
trainers, so a step's forward and backward pass, which are real, are padded to a fixed time, as if another device made
them: what is left over is the cores' time for the optimizer. The losses are compared in runs without that padding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import ROOT, Worker, WorkerError, add_before, end_on_signals, tree_with
from benchmarks.report import Figure, number, paired

RESULTS = Path(__file__).resolve().parent / "results"
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "reused gradients": {"reuse_grad_buffers": True},
    "delayed step": {"delay_optimizer_step": True, "offload_optimizer": True},
    "delayed gradients": {"delay_optimizer_step": True, "delay_grad_averaging": True, "offload_optimizer": True},
    "local updates": {"use_local_updates": True},
}
SYNCHRONOUS = ("synchronous", "reused gradients")
DELAYED = ("delayed step", "delayed gradients")
# Both sides alike. hivemind advises at least 3 s of matchmaking; with Shoal it is a bound and not a wait.
SETTINGS = {"matchmaking_time": 3.0, "averaging_timeout": 30.0}
BATCH = 32  # samples of a step
OTHERS = {"before": "Shoal's before", "hivemind": "hivemind's"}
WARM_UP = 1  # epochs that are not counted: peers find each other, optimizers allocate their state
LEAD = 0.5  # seconds between the command and the moment at which all peers begin
TIMEOUT = 150.0  # seconds for everything that a peer is asked
SEEDS, LOSS_EPOCHS, LOSS_TARGET = 5, 30, 256


@dataclass(frozen=True)
class Side:
    """One library: the interpreter that has it, what `benchmarks.workers.trainer` calls it, where its workers run."""

    python: str
    library: str
    tree: Path = ROOT


@dataclass(frozen=True)
class Timing:
    """One mode of one side, in one turn. Times in seconds per epoch, medians over epochs, of the slowest peer.

    Attributes:
        overhead: what an epoch takes beyond the trainers' compute.
        blocked: of it, what the trainer spends in `step`.
        samples_per_second: of all peers.
    """

    side: str
    model: str
    peers: int
    compute: float
    mode: str
    epoch: float = 0.0
    overhead: float = 0.0
    blocked: float = 0.0
    samples_per_second: float = 0.0
    failure: str | None = None

    @property
    def what(self) -> tuple[str, int, float, str]:
        """What was trained: model, peers, compute, mode."""
        return self.model, self.peers, self.compute, self.mode


class Swarm:
    """The trainers of one side, each a process; alive in the `with` block."""

    def __init__(self, side: Side, peers: int, logs: Path) -> None:
        self._library, self._runs = side.library, itertools.count()
        self._workers: list[Worker] = []
        with contextlib.ExitStack() as stack:
            for rank in range(peers):
                log = logs / f"{side.tree.name}-{side.library}-{peers}-{rank}.log"
                worker = Worker(side.python, "benchmarks.workers.trainer", [side.library], log, side.tree)
                stack.callback(worker.stop, 5.0)
                self._workers.append(worker)
            threads = max(1, (os.cpu_count() or 1) // peers)
            addresses = self._workers[0].ask("open", TIMEOUT, initial_peers=[], threads=threads)
            for worker in self._workers[1:]:
                worker.ask("open", TIMEOUT, initial_peers=addresses, threads=threads)
            self._stack = stack.pop_all()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _all(self, command: str, **arguments: Any) -> list[Any]:
        for worker in self._workers:
            worker.send(command, **arguments)
        return [worker.receive(TIMEOUT) for worker in self._workers]

    @contextlib.contextmanager
    def run(self, size: str, target: int, options: dict[str, Any], seed: int = 0) -> Iterator[int]:
        """A run of its own; gives the number of parameters."""
        name = f"run{next(self._runs)}"
        settings = options if self._library == "alone" else SETTINGS | options
        shared = {"run_id": name, "size": size, "target": target, "batch_size": BATCH, "options": settings}
        for rank, worker in enumerate(self._workers):
            worker.send("begin", seed=seed * len(self._workers) + rank, **shared)
        numels = [worker.receive(TIMEOUT) for worker in self._workers]
        yield numels[0]
        self._all("end")

    def train(self, epochs: int, step_seconds: float) -> list[list[dict[str, float]]]:
        """See `Trainer.train`, of each peer."""
        return self._all("train", at=time.monotonic() + LEAD, epochs=epochs, step_seconds=step_seconds)

    def evaluate(self) -> list[float]:
        """The loss of each peer."""
        return self._all("evaluate")


def say(progress: str) -> None:
    """Progress, apart from the report."""
    print(progress, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """How all sides train.

    Attributes:
        computes: seconds of an epoch's forward and backward passes.
        steps: of a peer in an epoch.
        epochs: that count, in each turn.
        turns: of each side in each mode.
    """

    modes: Sequence[str]
    computes: Sequence[float]
    steps: int
    epochs: int
    turns: int


def time_mode(swarm: Swarm, side: str, model: str, peers: int, compute: float, mode: str, plan: Plan) -> Timing:
    """Trains the epochs of a turn."""
    target = BATCH * plan.steps * peers
    with swarm.run(model, target, {} if side == "alone" else MODES[mode]):
        peers_records = swarm.train(WARM_UP + plan.epochs, compute / plan.steps)
    rows = []
    for records in peers_records:
        counted = records[WARM_UP:] or records
        rows.append(
            (
                statistics.median(r["seconds"] / r["epochs"] for r in counted),
                statistics.median((r["seconds"] - r["compute"]) / r["epochs"] for r in counted),
                statistics.median(r["blocked"] / r["epochs"] for r in counted),
                sum(r["steps"] for r in counted) * BATCH / sum(r["seconds"] for r in counted),
            )
        )
    epoch, overhead, blocked = (max(row[index] for row in rows) for index in range(3))
    speed = sum(row[3] for row in rows)
    return Timing(side, model, peers, compute, mode, epoch, overhead, blocked, speed)


def time_all(sides: dict[str, Side], model: str, peers: int, plan: Plan, logs: Path) -> Iterator[Timing]:
    """All modes of all sides, in turn."""
    with contextlib.ExitStack() as stack:
        swarms = {
            name: stack.enter_context(Swarm(side, 1 if name == "alone" else peers, logs))
            for name, side in sides.items()
        }
        for compute, mode, turn, side in itertools.product(plan.computes, plan.modes, range(plan.turns), sides):
            if side == "alone" and (mode, turn) != (plan.modes[0], 0):
                continue
            count = 1 if side == "alone" else peers
            try:
                timing = time_mode(swarms[side], side, model, count, compute, mode, plan)
            except WorkerError as error:
                timing = Timing(side, model, count, compute, mode, failure=str(error).splitlines()[0])
                swarms[side].__exit__()
                swarms[side] = stack.enter_context(Swarm(sides[side], count, logs))
            yield timing
            told = timing.failure or f"{timing.epoch:.2f} s an epoch, {timing.overhead:.3f} beyond compute"
            say(f"{model}, {peers} peers, {compute:g} s epochs, {mode}, {side}: {told}")


def losses(sides: dict[str, Side], modes: Sequence[str], logs: Path) -> dict[str, list[float]]:
    """The loss after equal samples, for every seed: of the plain process, and of 2 peers of Shoal in each mode."""
    found: dict[str, list[float]] = {}
    with Swarm(sides["alone"], 1, logs) as alone, Swarm(sides["shoal"], 2, logs) as shoal:
        for name, swarm, options in [("alone", alone, {}), *((mode, shoal, MODES[mode]) for mode in modes)]:
            for seed in range(SEEDS):
                with swarm.run("0.3M", LOSS_TARGET, options, seed):
                    swarm.train(LOSS_EPOCHS, 0.0)
                    found.setdefault(name, []).append(swarm.evaluate()[0])
            say(f"losses, {name}: {', '.join(f'{loss:.3f}' for loss in found[name])}")
    return found


def distance(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Of the means, in standard errors of their difference."""
    error = (statistics.variance(ours) / len(ours) + statistics.variance(plain) / len(plain)) ** 0.5
    return float(abs(statistics.mean(ours) - statistics.mean(plain)) / error)


def compare(timings: Sequence[Timing], computes: Sequence[float], found: dict[str, list[float]]) -> list[Figure]:
    """What is promised."""
    figures: list[tuple[str, float | None, str]] = []
    long, short = max(computes), min(computes)
    turns: dict[tuple[str, int, float, str], dict[str, list[Timing]]] = {}
    for timing in timings:
        turns.setdefault(timing.what, {}).setdefault(timing.side, []).append(timing)

    def each(timings: Sequence[Timing], field: str) -> list[float | None]:
        return [None if t.failure else float(getattr(t, field)) for t in timings]

    for (model, peers, compute, mode), by_side in turns.items():
        where = f"{model}, {peers} peers, {compute:g} s epochs, {mode}"
        ours = by_side.get("shoal", [])
        if mode in DELAYED:
            blocked = paired(each(ours, "blocked"), each(ours, "epoch"))
            figures.append((f"{where}: blocked, of an epoch", blocked, "<= 0.05"))
        for other, bound in (("before", "<= 0.5"), ("hivemind", "<= 0.2")):
            if theirs := by_side.get(other, [])[: len(ours)]:  # a run that is cut ends in the middle of a turn
                ratio = paired(each(ours[: len(theirs)], "overhead"), each(theirs, "overhead"))
                figures.append((f"{where}: beyond compute, of {OTHERS[other]}", ratio, bound))
                if other == "hivemind" and compute == short < long:
                    speed = paired(each(ours[: len(theirs)], "samples_per_second"), each(theirs, "samples_per_second"))
                    figures.append((f"{where}: samples/s, of {OTHERS[other]}", speed, ">= 3"))
    for mode, values in found.items():
        if mode != "alone":
            name = f"loss, {mode}: distance of the means, in standard errors"
            figures.append((name, distance(values, found["alone"]), "<= 2"))
    return [Figure(name, value, bound) for name, value, bound in figures if value is not None]


def medians(timings: Sequence[Timing]) -> list[Timing]:
    """One for each mode and side: the medians of its turns, or why they failed."""
    turns: dict[tuple[Any, ...], list[Timing]] = {}
    for timing in timings:
        turns.setdefault((*timing.what, timing.side), []).append(timing)
    made = []
    for them in turns.values():
        if good := [timing for timing in them if not timing.failure]:
            fields = ("epoch", "overhead", "blocked", "samples_per_second")
            values = {field: statistics.median(getattr(timing, field) for timing in good) for field in fields}
            made.append(replace(good[0], **values))
        else:
            made.append(them[0])
    return made


def timing_table(timings: Sequence[Timing]) -> str:
    """One line per mode and side."""
    head = [
        "model, peers, compute s, mode",
        "side",
        "epoch s",
        "beyond compute s",
        "blocked s",
        "epochs/s",
        "samples/s",
    ]
    return report.table(
        head,
        [
            [
                f"{t.model}, {t.peers}, {t.compute:g}, {t.mode if t.side != 'alone' else 'plain Adam'}",
                t.side,
                *(
                    [t.failure, "-", "-", "-", "-"]
                    if t.failure
                    else [
                        number(t.epoch),
                        number(t.overhead, 3),
                        number(t.blocked, 3),
                        number(1 / t.epoch),
                        number(t.samples_per_second, 0),
                    ]
                ),
            ]
            for t in medians(timings)
        ],
    )


def loss_table(found: dict[str, list[float]]) -> str:
    """Means over the seeds."""
    rows = [
        [name, number(statistics.mean(values), 4), number(statistics.stdev(values) / len(values) ** 0.5, 4)]
        for name, values in found.items()
    ]
    return report.table(["loss after equal samples", "mean, nats", "standard error"], rows)


NOTE = f"""\
Every peer's step: {BATCH} samples, forward and backward padded to an even part of an epoch's compute. Medians over the
epochs after the first, of the slowest peer, and over the turns; figures are medians of the ratios of turns side by
side. *Beyond compute* is what an epoch takes besides those passes, *blocked* what of it the trainer spends in
`optimizer.step()`. *alone*: one plain process with Adam, as many accumulated steps an epoch. All peers have
matchmaking_time={SETTINGS["matchmaking_time"]:g}, and every process as many compute threads as there are cores for
each, at least one."""


def main() -> None:
    """Parses the command line, measures, reports; exit code 1 when Shoal failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", metavar="PATH", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--models", nargs="+", default=["0.3M", "6.3M", "25M"], help="parameters (default: all)")
    parser.add_argument("--peers", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--compute", nargs="+", type=float, default=[3.0, 0.5], help="seconds of an epoch")
    parser.add_argument("--steps", type=int, default=10, help="of every peer in an epoch (default: 10)")
    parser.add_argument("--epochs", type=int, default=3, help="that count, in each turn (default: 3)")
    parser.add_argument("--turns", type=int, default=1, help="of each side in each mode (default: 1)")
    parser.add_argument("--no-losses", action="store_true", help="leave the comparison of losses out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for optimizer.md and optimizer.json")
    add_before(parser)
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    plan = Plan(options.modes, options.compute, options.steps, options.epochs, options.turns)
    timings: list[Timing] = []
    found: dict[str, list[float]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            logs = Path(folder)
            sides = {name: Side(sys.executable, name) for name in ("alone", "shoal")}
            if options.before:
                sides["before"] = Side(sys.executable, "shoal", tree_with(options.before, logs))
            if options.hivemind_python:
                sides["hivemind"] = Side(options.hivemind_python, "hivemind")
            for model, peers in itertools.product(options.models, options.peers):
                for timing in time_all(sides, model, peers, plan, logs):
                    timings.append(timing)
            compared = [mode for mode in SYNCHRONOUS if mode in options.modes]
            found |= {} if options.no_losses else losses(sides, compared, logs)
    finally:  # a run that is cut short tells what it has measured
        tell(timings, found, facts, options)
    sys.exit(1 if any(timing.failure for timing in timings if timing.side == "shoal") else 0)


def tell(
    timings: Sequence[Timing], found: dict[str, list[float]], facts: dict[str, Any], options: argparse.Namespace
) -> None:
    """Reports what was measured."""
    figures = compare(timings, options.compute, found)
    chosen = {name: getattr(options, name) for name in ("steps", "epochs", "turns")}
    parts = ["# Training with `Optimizer`", report.describe(facts | chosen), timing_table(timings), NOTE]
    parts += [loss_table(found)] if found else []
    parts.append(report.figure_table(figures, "figure"))
    data = {
        "environment": facts | chosen,
        "timings": [asdict(timing) for timing in timings],
        "losses": found,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    report.publish(options.out, "optimizer", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()
