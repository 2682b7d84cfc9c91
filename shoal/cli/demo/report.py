"""The demo's folder: the summary as a table and as JSON, the loss curve as a picture, the generated text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import mean

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.cli.demo.record import Record
from shoal.cli.demo.summary import Summary

NO_PICTURE = "no loss curve: matplotlib is not installed; pip install 'shoal[demo]'"


def can_draw() -> bool:
    """Whether matplotlib, which draws the loss curve, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(record: Record, summary: Summary, console: Console) -> None:
    """Write the report to the folder ``summary.settings.out``, which must exist, and show it."""
    out = summary.settings.out
    table = summary_table(summary)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary, enc_hook=str), indent=2) + b"\n")
    with (out / "report.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(table)
    (out / "sample.txt").write_text(record.sample, encoding="utf-8")
    if can_draw():
        draw_losses(record, summary, out / "loss.png")
    console.print(table)
    if record.sample:
        console.rule("generated text")
        console.print(record.sample, markup=False, highlight=False)
        console.rule()
    for problem in summary.problems:
        console.print(f"problem: {problem}", style="bold red", markup=False, soft_wrap=True)
    for unreached in summary.unreached:
        console.print(f"not reached in {summary.settings.epochs} epochs: {unreached}", markup=False, soft_wrap=True)
    if not can_draw():
        console.print(NO_PICTURE, markup=False)
    console.print(f"kept in {out}", markup=False, highlight=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """The table that ends the demo."""
    table = Table("", "", show_header=False, title="shoal demo")
    digests = f"yes, in {summary.epochs_compared} epochs" if summary.digests_equal else "NO"
    rows = {
        "epochs": str(summary.epochs),
        "held-out loss before": _number(summary.loss_before, "nats per character"),
        "held-out loss after": _number(summary.loss_after, "nats per character"),
        "bigram model's loss": _number(summary.bigram_loss, "nats per character"),
        "rounds committed": str(summary.epochs),
        "median time of an epoch": _number(summary.median_epoch_seconds, "s"),
        "median time of a round": _number(summary.median_round_seconds, "s"),
        "  of it matchmaking": _number(summary.median_matchmaking_seconds, "s"),
        "  of it all-reduce": _number(summary.median_allreduce_seconds, "s"),
        "median moved in a round": _number(summary.median_round_bytes, "MB", 1e-6),
        "from SIGKILL to the next epoch": _number(summary.recovery_seconds, "s"),
        "newcomer, from ready to first epoch": _number(summary.catch_up_seconds, "s"),
        "newcomer, from start to first epoch": _number(summary.catch_up_after_start_seconds, "s"),
        "digests of all peers equal": digests if summary.epochs_compared else "nothing to compare",
        "total time": _number(summary.total_seconds, "s"),
        "result": _result(summary),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _result(summary: Summary) -> str:
    if (count := len(summary.problems)) > 0:
        return "1 problem" if count == 1 else f"{count} problems"
    return f"as promised, as far as {summary.settings.epochs} epochs show" if summary.unreached else "as promised"


def draw_losses(record: Record, summary: Summary, path: Path) -> None:
    """Draw a PNG of the training and held-out loss by epoch, with the bigram model's loss, the kill and the
    newcomer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    epochs = sorted({epoch for peer in record.peers.values() for epoch in peer.progress})
    losses = [
        mean(peer.progress[epoch].loss for peer in record.peers.values() if epoch in peer.progress) for epoch in epochs
    ]
    axes.plot(epochs, losses, color="tab:blue", alpha=0.5, label="training, mean of the peers")
    evaluated = [found.epoch for found in record.evaluations]
    held_out = [found.held_out_loss for found in record.evaluations]
    axes.plot(evaluated, held_out, "o-", color="tab:orange", label="held out")
    if summary.bigram_loss is not None:
        axes.axhline(summary.bigram_loss, color="gray", linestyle="--", label="bigram model, held out")
    for peer in record.peers.values():
        if peer.killed_at is not None and peer.committed:
            axes.axvline(max(peer.committed), color="tab:red", linestyle=":", label=f"{peer.name} killed")
        if peer.index == record.newcomer and peer.committed:
            axes.axvline(min(peer.committed), color="tab:green", linestyle=":", label=f"{peer.name} joined")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss (nats per character)")
    axes.legend()
    figure.savefig(path, dpi=120)


def _number(value: float | None, unit: str, scale: float = 1.0) -> str:
    return "none" if value is None else f"{value * scale:.4g} {unit}"
