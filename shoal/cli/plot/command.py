"""``shoal plot`` from arguments to a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console

from shoal.cli.plot.picture import draw, summary
from shoal.cli.plot.story import story_of
from shoal.health.trace import read_trace


def run_plot(traces: Sequence[Path], out: Path, console: Console) -> None:
    """Draw these traces into a file, and say what they come to.

    Raises:
        OSError: if a file can't be read or written.
        ValueError: if a line of a trace is no event, or if there is none.
    """
    story = story_of(chain.from_iterable(map(read_trace, traces)))
    draw(story, out)
    console.print(f"{summary(story)}\ndrawn: {out}", soft_wrap=True)
