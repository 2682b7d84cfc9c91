"""What a demo comes to: its numbers, all problems, a table, and the loss curve as a picture."""

from __future__ import annotations

import importlib.util
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.cli.demo.script import Demo
from shoal.cli.demo.settings import ENOUGH_EPOCHS, DemoSettings
from shoal.cli.demo.text import load_text

T = TypeVar("T")

NO_PICTURE = "no loss curve: matplotlib is not installed; pip install 'shoal[demo]'"


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Train, report, and return the exit code: 0 if everything went as promised, else 1.

    Raises :class:`~shoal.cli.demo.text.TextError` if the text cannot be used.
    """
    load_text(settings.data)  # here, so that an unusable text is one clear error and not one for each peer
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    if not can_draw():
        console.print(NO_PICTURE, markup=False)
    with Demo(settings, console) as demo:
        demo.run()
    return 1 if write_report(demo, time.monotonic() - demo.started_at, console) else 0


def can_draw() -> bool:
    """Whether matplotlib, which draws the loss curve, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(demo: Demo, seconds: float, console: Console) -> list[str]:
    """Write the report of a run that took so many seconds to the run's folder, and show it. Returns the problems."""
    settings, out, told = demo.settings, Path(demo.settings.out), demo.told
    reports = [report for _, _, report in told["EpochReport"]]
    times: dict[int, float] = {}  # by epoch: when the first peer committed it
    moved: dict[int, float] = defaultdict(float)
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    for _, child, report in [*told["DownloadReport"], *told["EpochReport"]]:
        digests[report["epoch"]][child.name] = report["state_digest"]
    for at, _, report in sorted(told["EpochReport"], key=lambda one: one[0]):
        times.setdefault(report["epoch"], at)
        moved[report["epoch"]] += report["bytes_sent"]
    losses = [details for _, _, details in told["evaluated"]]
    final = _first(loss for epoch, loss in losses if epoch >= settings.epochs)
    bigram = _first(loss for _, _, loss in told["ready"] if loss is not None)
    killed_at = _first(child.killed_at for child in demo.children if child.killed_at is not None)
    # Peers tell one after the other. So an epoch that any peer, even the victim, had told of before the kill is not the
    # next one.
    known = max((epoch for epoch, at in times.items() if at <= (killed_at or 0.0)), default=-1)
    next_at = _first(at for epoch, at in times.items() if killed_at is not None and epoch > known)
    newcomer = _first(demo.children[settings.peers :])
    started_at = None if newcomer is None else newcomer.started_at
    ready_at = _first(at for at, child, _ in told["ready"] if child is newcomer)
    joined_at = _first(at for at, child, _ in told["EpochReport"] if child is newcomer)
    compared = {epoch: [*found.values()] for epoch, found in sorted(digests.items()) if len(found) > 1}
    problems = [*demo.failures] + [
        f"in epoch {epoch} {len(found)} peers had {len(set(found))} different states"
        for epoch, found in compared.items()
        if len(set(found)) > 1
    ]
    is_equal = len(problems) == len(demo.failures)
    goals = {
        "no epoch was committed by more than one peer": settings.peers == 1 or len(reports) > len(times),
        "no peer was killed: the run ended before it was due": killed_at is not None or not settings.kill,
        "no epoch was committed after the kill": killed_at is None or next_at is not None,
        "no newcomer was started: the run ended before it was due": newcomer is not None,
        "the held-out loss at the end was not measured": bigram is not None and final is not None,
    }
    problems += [problem for problem, is_met in goals.items() if not is_met]
    late = [f"the newcomer, {newcomer.name}, committed no epoch"] if newcomer and joined_at is None else []
    if bigram is not None and final is not None and not final < bigram:
        late.append(f"the held-out loss {final:.3f} is not below the bigram model's {bigram:.3f}")
    is_short = settings.epochs < ENOUGH_EPOCHS
    unreached = [f"{one}; it takes some {ENOUGH_EPOCHS} epochs" for one in late] if is_short else []
    problems += [] if is_short else late
    result = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "as promised"
    result += f", as far as {settings.epochs} epochs show" if unreached and not problems else ""
    equal = f"yes, in {len(compared)} epochs" if is_equal else "NO"
    gaps = [after - before for before, after in pairwise(times.values())]
    rows: list[tuple[str, str, Any, str]] = [
        ("epochs", "epochs", len(times), ""),
        ("loss_before", "held-out loss before", losses[0][1] if losses else None, "nats per character"),
        ("loss_after", "held-out loss after", final, "nats per character"),
        ("bigram_loss", "bigram model's loss", bigram, "nats per character"),
        ("rounds", "rounds committed", len(times), ""),
        ("median_epoch_seconds", "median time of an epoch", _median(gaps), "s"),
        ("median_round_seconds", "median time of a round", _median(_all(reports, "round_seconds")), "s"),
        ("median_matchmaking_seconds", "  of it matchmaking", _median(_all(reports, "matchmaking_seconds")), "s"),
        ("median_allreduce_seconds", "  of it all-reduce", _median(_all(reports, "allreduce_seconds")), "s"),
        ("median_round_megabytes", "median moved in a round", _median(moved.values(), 1e-6), "MB"),
        ("recovery_seconds", "from SIGKILL to the next epoch", _since(killed_at, next_at), "s"),
        ("catch_up_seconds", "newcomer, from ready to first epoch", _since(ready_at, joined_at), "s"),
        ("catch_up_after_start_seconds", "newcomer, from start to first epoch", _since(started_at, joined_at), "s"),
        ("digests_equal", "digests of all peers equal", equal if compared else "nothing to compare", ""),
        ("total_seconds", "total time", seconds, "s"),
        ("result", "result", result, ""),
    ]
    table = Table("", "", show_header=False, title="shoal demo")
    for _, name, value, unit in rows:
        text = "none" if value is None else f"{value:.4g} {unit}" if unit else str(value)
        table.add_row(name, text)
    numbers = {"settings": settings, **{key: value for key, _, value, _ in rows}}
    numbers |= {"epochs_compared": len(compared), "problems": problems, "unreached": unreached}
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(numbers), indent=2) + b"\n")
    with (out / "report.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(table)
    sample = _first(text for _, _, text in told["finished"] if text) or ""
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    console.print(table)
    if sample:
        console.rule("generated text")
        console.print(sample, markup=False, highlight=False)
        console.rule()
    for problem in problems:
        console.print(f"problem: {problem}", style="bold red", markup=False, soft_wrap=True)
    for goal in unreached:
        console.print(f"not reached in {settings.epochs} epochs: {goal}", markup=False, soft_wrap=True)
    if can_draw():
        draw_losses(demo, losses, bigram, out / "loss.png")
    else:
        console.print(NO_PICTURE, markup=False)
    console.print(f"kept in {out}", markup=False, highlight=False, soft_wrap=True)
    return problems


def draw_losses(demo: Demo, losses: Sequence[tuple[int, float]], bigram: float | None, path: Path) -> None:
    """Draw a PNG of the training and held-out loss by epoch, with the bigram model's loss, the kill and the
    newcomer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss (nats per character)")
    trained: dict[int, list[float]] = defaultdict(list)
    for _, _, (epoch, loss, _) in demo.told["trained"]:
        trained[epoch].append(loss)
    epochs = sorted(trained)
    means = [mean(trained[epoch]) for epoch in epochs]
    axes.plot(epochs, means, color="tab:blue", alpha=0.5, label="training, mean of the peers")
    axes.plot(*zip(*losses, strict=True), "o-", color="tab:orange", label="held out") if losses else None
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", label="bigram model, held out")
    for number, child in enumerate(demo.children):
        committed = [report["epoch"] for _, peer, report in demo.told["EpochReport"] if peer is child]
        if committed and child.killed_at is not None:
            axes.axvline(max(committed), color="tab:red", linestyle=":", label=f"{child.name} killed")
        if committed and number >= demo.settings.peers:
            axes.axvline(min(committed), color="tab:green", linestyle=":", label=f"{child.name} joined")
    axes.legend()
    figure.savefig(path, dpi=120)


def _first(values: Iterable[T]) -> T | None:
    return next(iter(values), None)


def _all(reports: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [report[name] for report in reports]


def _median(values: Iterable[float], scale: float = 1.0) -> float | None:
    known = [value * scale for value in values]
    return median(known) if known else None


def _since(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start
