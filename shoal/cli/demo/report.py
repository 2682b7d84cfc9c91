"""What a demo comes to: its numbers, all problems, a table, and a picture of what each peer did."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.cli.demo.script import ENOUGH_EPOCHS, Demo, DemoSettings

TRACES = "peer-*.jsonl"  # of the peers, in the run's folder


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Train, report, and return the exit code: 0 if everything went as promised, else 1."""
    settings.out.mkdir(parents=True, exist_ok=True)
    for trace in settings.out.glob(TRACES):  # of an earlier run, to which the peers would add
        trace.unlink()
    demo = Demo(settings, console)
    demo.run()
    return 1 if write_report(demo, console) else 0


def write_report(demo: Demo, console: Console) -> list[str]:
    """Write the report of a run that has just ended to the run's folder, and show it. Returns the problems."""
    settings, out, told, newcomers = demo.settings, demo.settings.out, demo.told, demo.children[demo.settings.peers :]
    reports = sorted(told["EpochReport"], key=lambda one: one[0])
    times = {report["epoch"]: at for at, _, report in reversed(reports)}  # when the first peer committed it
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    for _, child, report in [*told["DownloadReport"], *reports]:
        digests[report["epoch"]][child.name] = report["state_digest"]
    compared = {epoch: set(found.values()) for epoch, found in sorted(digests.items()) if len(found) > 1}
    forked = [epoch for epoch, states in compared.items() if len(states) > 1]
    # What was not measured is nan, and so is all that is computed with it.
    first = next((loss for *_, (_, loss) in told["evaluated"]), nan)
    final = next((loss for *_, (epoch, loss) in told["evaluated"] if epoch >= settings.epochs), nan)
    bigram = next((loss for *_, loss in told["ready"]), nan)
    # Peers tell one after the other. So an epoch that any peer, even the victim, had told of before the kill is not the
    # next one.
    killed = max((epoch for epoch, at in times.items() if at <= demo.killed_at), default=nan)
    next_at = min((at for epoch, at in times.items() if epoch > killed), default=nan)
    ready_at = next((at for at, child, _ in told["ready"] if child in newcomers), nan)
    joined_at, joined = next(((at, one["epoch"]) for at, child, one in reports if child in newcomers), (nan, nan))
    goals = {
        f"the peers had different states in epochs {forked}": not forked,
        "no epoch was committed by more than one peer": settings.peers == 1 or len(reports) > len(times),
        "no peer was killed, or no epoch was committed after it": not settings.kill or next_at > demo.killed_at,
        "the held-out loss at the end was not measured": not isnan(final - bigram),
    }
    late = {
        "no newcomer committed an epoch": not isnan(joined_at),
        f"the held-out loss {final:.3f} is not below the bigram model's {bigram:.3f}": not final >= bigram,
    }
    if settings.epochs >= ENOUGH_EPOCHS:
        goals, late = goals | late, {}
    problems = demo.failures + [goal for goal, is_met in goals.items() if not is_met]
    unreached = [f"{goal}; it takes some {ENOUGH_EPOCHS} epochs" for goal, is_met in late.items() if not is_met]
    gaps = [after - before for before, after in pairwise(sorted(times.values()))]
    rows = {
        "epochs committed": len(times),
        "held-out loss before, nats per byte": first,
        "held-out loss after, nats per byte": final,
        "bigram model's loss, nats per byte": bigram,
        "median seconds of an epoch": median(gaps or [nan]),
        "median seconds of a round": median([report["round_seconds"] for *_, report in reports] or [nan]),
        "seconds from SIGKILL to the next epoch": next_at - demo.killed_at,
        "seconds of the newcomer from ready to its first epoch": joined_at - ready_at,
        "first epoch of the newcomer": joined,
        "digests of all peers equal": "NO" if forked else f"yes, in {len(compared)} epochs",
        "total seconds": time.monotonic() - demo.started_at,
        "result": "not as promised" if problems else "as promised, as far as it went" if unreached else "as promised",
    }
    table = Table("", "", show_header=False, title="shoal demo")
    for name, value in rows.items():
        table.add_row(name, f"{value:.4g}".replace("nan", "none") if isinstance(value, float) else str(value))
    numbers = {"settings": settings, **rows, "problems": problems, "unreached": unreached}
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(numbers, enc_hook=str)) + b"\n")
    console.print(table)
    console.rule("generated text")
    console.print(*(text for *_, text in told["finished"]))
    for line in [f"problem: {problem}" for problem in problems] + [f"not reached: {goal}" for goal in unreached]:
        console.print(line, style="bold", soft_wrap=True)
    draw_run(out, console)
    console.print(f"kept in {out}", soft_wrap=True)
    return problems


def draw_run(out: Path, console: Console) -> None:
    """Draw the traces of the peers, as ``shoal plot`` does."""
    try:
        from shoal.cli.plot.command import run_plot
    except ModuleNotFoundError as error:
        console.print(f"no picture: {error.name} is not installed; pip install 'shoal[demo]'")
        return
    if traces := sorted(out.glob(TRACES)):
        run_plot(traces, out / "run.png", console)
