"""Draws a story: a grid of the replicas over time, and below it the samples and the loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from shoal.cli.plot.story import Doing, Story

COLOURS = {
    Doing.COMPUTING: "#7fb069",
    Doing.STARTING: "#c9c9c9",
    Doing.WAITING: "#edae49",
    Doing.ROUND: "#00798c",
    Doing.DOWNLOADING: "#8e6bbf",
    Doing.STOPPED: "#6b6b6b",
    Doing.DEAD: "#d1495b",
}
COLUMNS, PARTS = 1200, 5  # of the grid, fewer than pixels; and of each column, whose colour is the mean of its parts
MOST_LABELS, LABEL = 40, 24  # labels, and characters of one
MOST_LINES = 80  # between the rows of so many replicas
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw(story: Story, path: Path) -> None:
    """Draw a story into a file, whose suffix says what it is: .svg or .png.

    Raises:
        OSError: if the file can't be written.
    """
    count, seconds = len(story.replicas), max(story.end - story.begin, 1e-3)
    unit, length = next(((unit, length) for unit, length in UNITS if seconds >= 5 * length), UNITS[-1])
    span, height = seconds / length, min(9.0, max(1.2, 0.24 * count))
    figure = Figure(figsize=(11, height + 4.4), layout="constrained")
    rows, samples, losses = figure.subplots(3, 1, height_ratios=[height, 1.5, 1.5])

    parts = grid(story, COLUMNS * PARTS)
    colours = numpy.array([(255, 255, 255), *(_rgb(COLOURS[doing]) for doing in Doing)], dtype=numpy.uint8)
    image = numpy.stack([colours[row].reshape(COLUMNS, PARTS, 3).mean(1).astype(numpy.uint8) for row in parts])
    rows.imshow(image, aspect="auto", interpolation="nearest", extent=(0, span, count, 0))
    if count <= MOST_LINES:
        rows.hlines(range(1, count), 0, span, color="white", linewidth=1.5)
    step = -(-count // MOST_LABELS)
    # `parse_math`: a name is no formula.
    labels = [shown(name) for name in list(story.replicas)[::step]]
    rows.set_yticks([number + 0.5 for number in range(0, count, step)], labels, parse_math=False)
    rows.set_xlim(0, span)
    rows.tick_params(labelbottom=False)
    rows.set_title(summary(story), parse_math=False, fontsize="medium")
    shares = shares_of(parts)
    told = [Patch(color=COLOURS[doing], label=f"{doing.value} {100 * share:.1f} %") for doing, share in shares.items()]
    figure.legend(handles=told, loc="outside upper center", ncols=len(Doing), frameon=False, fontsize="small")

    times = [(at - story.begin) / length for at, _ in story.committed]
    samples.step([0.0, *times, span], _held([total for _, total in story.committed]), where="post", color="#00798c")
    samples.set(xlim=(0, span), ylim=(0, None), xlabel=unit, ylabel="samples in steps")
    samples.yaxis.set_major_formatter("{x:,.0f}")
    losses.plot([total for total, _ in story.losses], [loss for _, loss in story.losses], color="#d1495b")
    losses.set(xlabel="samples in steps", ylabel="loss")
    losses.xaxis.set_major_formatter("{x:,.0f}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name in a script that the font lacks: it has boxes
        figure.savefig(path, dpi=130)


def grid(story: Story, columns: int) -> NDArray[numpy.uint8]:
    """What each replica did in each of so many equal parts of the time.

    Returns:
        A row for each replica: 0 where nothing is known, else 1 and the place in `Doing`.
    """
    found = numpy.zeros((len(story.replicas), columns), dtype=numpy.uint8)
    scale = columns / max(story.end - story.begin, 1e-3)
    for row, spans in zip(found, story.replicas.values(), strict=True):
        for number, doing in enumerate(Doing, 1):
            for begin, end in spans[doing]:
                row[round((begin - story.begin) * scale) : round((end - story.begin) * scale)] = number
    return found


def shares_of(parts: NDArray[numpy.uint8]) -> dict[Doing, float]:
    """The share of each thing that the replicas did, in the time of which something is known."""
    counts = numpy.bincount(parts.ravel(), minlength=len(Doing) + 1)[1:]
    return {doing: count / max(1, counts.sum()) for doing, count in zip(Doing, counts, strict=True)}


def summary(story: Story) -> str:
    """One line on what the run came to."""
    replicas, steps = len(story.replicas), len(story.committed)
    total = story.committed[-1][1] if steps else 0.0
    text = f"{replicas:,} replica{'s' * (replicas != 1)}, {total:,.0f} samples in {steps:,} step{'s' * (steps != 1)}"
    reasons = sorted(story.lost.items(), key=lambda one: -one[1])
    lost = ", ".join(f"{samples:,.0f} {shown(reason)}" for reason, samples in reasons[:5])
    return f"{text}; lost: {lost}" if lost else text


def shown(text: str) -> str:
    """A name or reason of a trace as it is drawn. XML and terminals refuse some of the characters that are not
    printable."""
    return "".join(each if each.isprintable() else " " for each in text[:LABEL])


def _held(totals: Sequence[float]) -> list[float]:
    return [0.0, *totals, totals[-1] if totals else 0.0]


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
