"""``shoal demo`` from settings to exit code."""

from __future__ import annotations

from rich.console import Console

from shoal.cli.demo.report import NO_PICTURE, can_draw, write_report
from shoal.cli.demo.settings import DemoSettings, load_text
from shoal.cli.demo.summary import summarise
from shoal.cli.demo.swarm import Swarm
from shoal.cli.demo.view import open_view


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Train, report, and return the exit code: 0 if everything went as promised, else 1.

    Raises :class:`~shoal.cli.demo.text.TextError` if the text cannot be used.
    """
    load_text(settings.data)  # Here, so that an unusable text is one clear error and not one for each peer.
    settings.out.mkdir(parents=True, exist_ok=True)
    if not can_draw():
        console.print(NO_PICTURE, markup=False)
    with open_view(console, settings.epochs) as view, Swarm(settings, view) as swarm:
        record = swarm.run()
    summary = summarise(record, settings)
    write_report(record, summary, console)
    return 1 if summary.problems else 0
