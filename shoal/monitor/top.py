"""`shoal top`: draws a snapshot on one screen of a terminal."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.monitor.snapshot import Happening, PeerView, Phases, Snapshot, Standing

REFRESH_SECONDS = 1.0
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 60
LONG_SECONDS = 20.0  # only of longer epochs the progress is shown: records are up to 10 s old
MAX_HAPPENINGS, MAX_ROWS, MAX_NOTES = 8, 20, 6
MARK_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "white", "bright_black")
PHASE_STYLES = {"computing": "green", "waiting": "yellow", "matchmaking": "magenta", "exchange": "blue", "step": "cyan"}
PHASE_NAMES = {"exchange": "bytes"}
PHASE_WIDTH = 50
TOO_LARGE = 1e9  # larger numbers are not written in full
STANDING_STYLES = {Standing.HERE: "green", Standing.SILENT: "yellow", Standing.LOST: "red", Standing.LEFT: "dim"}


def as_json(snapshot: Snapshot) -> str:
    """The snapshot as one line of JSON."""
    return msgspec.json.encode(snapshot).decode()


class LossBars:
    """The losses of the last epochs, from snapshots, as a line of bars."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=MAX_SPARKS)
        self._epoch = -1

    def add(self, snapshot: Snapshot) -> None:
        """Add the loss of a snapshot, if it is of a new epoch."""
        if snapshot.loss is not None and snapshot.epoch != self._epoch:
            self._seen.append(snapshot.loss)
            self._epoch = snapshot.epoch

    def __str__(self) -> str:
        if not self._seen:
            return ""
        least, most = min(self._seen), max(self._seen)
        scale = (len(SPARKS) - 1) / (most - least) if most > least else 0.0
        return "".join(SPARKS[round((loss - least) * scale)] for loss in self._seen)


def screen(snapshot: Snapshot, losses: LossBars) -> RenderableType:
    """The whole screen. From top to bottom: the verdict, the loss, the epoch, the phases of an epoch, peers, events.

    Texts from peers are shown as plain text, never as markup.
    """
    mark = Text("● ", "green" if snapshot.is_well else "red")
    head = Text.assemble(mark, (snapshot.sentence, "bold"))
    when = datetime.fromtimestamp(snapshot.at).strftime("%H:%M:%S")
    parts: list[RenderableType] = [head, Text(f"{snapshot.run_id}   {when}", "dim"), Text()]
    if snapshot.loss is not None:
        parts.append(Text.assemble("loss  ", (f"{_number(snapshot.loss, 4)}  ", "bold"), (str(losses), "cyan")))
    if snapshot.target:
        parts.append(_epoch_line(snapshot))
    if snapshot.phases is not None:
        parts += [_phase_line(snapshot.phases), Text(snapshot.advice, "italic")]
    parts += [Text(), _table(snapshot), *_notes(snapshot)]
    if snapshot.happenings:
        parts += [Text(), *map(_line_of, snapshot.happenings[-MAX_HAPPENINGS:])]
    return Group(*parts)


def _number(value: float, digits: int) -> str:
    """The number with so many digits after the point. Numbers that only a false record can have are written shortly."""
    return f"{value:.{digits}f}" if abs(value) < TOO_LARGE else f"{value:.1e}"


def _epoch_line(snapshot: Snapshot) -> RenderableType:
    """The progress of the epoch; only its target and pace if it is so short that records can't show progress."""
    pace = f"{_number(snapshot.samples_per_second, 1)} {snapshot.counted} a second"
    target = _number(snapshot.target, 0)
    if snapshot.epoch_seconds <= LONG_SECONDS:
        return Text(f"epoch {snapshot.epoch}: {target} {snapshot.counted}, {pace}")
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=snapshot.target, completed=min(snapshot.samples, snapshot.target), width=PHASE_WIDTH)
    grid.add_row(f"epoch {snapshot.epoch}", bar, f"{_number(snapshot.samples, 0)} of {target}, {pace}")
    return grid


def _phase_line(phases: Phases) -> Text:
    whole = sum(getattr(phases, name) for name in PHASE_STYLES)
    line, legend = Text("time  "), Text("\n ")
    for name, style in PHASE_STYLES.items():
        seconds = getattr(phases, name)
        line.append("█" * round(PHASE_WIDTH * seconds / whole) if whole else "", style)
        legend.append(" ■ ", style)
        legend.append(f"{PHASE_NAMES.get(name, name)} {seconds:.2f}")
    return line + legend.append(" s")


def _table(snapshot: Snapshot) -> Table:
    """At most 80 columns wide."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("peer", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in (
        "epoch",
        "loss",
        "samples/s" if snapshot.counted == "samples" else "steps/s",
        "share",
        "MB/s ↑/↓",
        "sees",
        "seen",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    shown = sorted(snapshot.peers, key=lambda peer: not peer.findings) if _is_long(snapshot) else snapshot.peers
    for peer in shown[:MAX_ROWS]:
        table.add_row(*_cells(peer))
    return table


def _is_long(snapshot: Snapshot) -> bool:
    return len(snapshot.peers) > MAX_ROWS


def _cells(peer: PeerView) -> list[RenderableType]:
    standing = peer.standing.value if peer.standing is not Standing.HERE else "joining" if peer.joining else peer.role
    return [
        Text(f"…{peer.name}"),
        Text(standing, STANDING_STYLES[peer.standing]),
        Text(_number(peer.epoch, 0)),
        Text("" if peer.loss is None else f"{peer.loss:.4g}"),
        Text(_number(peer.samples_per_second, 1)),
        Text(f"{peer.share:.0%}"),
        Text(f"{_number(peer.up / 1e6, 2)}/{_number(peer.down / 1e6, 2)}"),
        Text(_number(peer.members, 0)),
        Text(f"{peer.seen:.0f} s"),
        _mark_of(peer.mark),
    ]


def _notes(snapshot: Snapshot) -> list[RenderableType]:
    """Lines about peers that are not well, about those that join, and about the versions that peers run."""
    bad = [peer for peer in snapshot.peers if peer.findings]
    joining = [peer for peer in snapshot.peers if peer.joining]
    notes: list[RenderableType] = []
    if _is_long(snapshot):
        notes.append(Text(f"and {len(snapshot.peers) - MAX_ROWS} more; peers that are not well come first", "dim"))
    notes += [Text(f"…{peer.name} {'; '.join(map(str, peer.findings))}", "red") for peer in bad[:MAX_NOTES]]
    if len(bad) > MAX_NOTES:
        notes.append(Text(f"and {len(bad) - MAX_NOTES} more that are not well", "red"))
    notes += [Text(f"…{peer.name} is joining: {peer.joining}", "yellow") for peer in joining[:MAX_NOTES]]
    runs = Counter(f"Shoal {peer.version}, torch {peer.torch}" for peer in snapshot.peers)
    notes += [Text(f"{count} of {len(snapshot.peers)} run {what}", "dim") for what, count in runs.most_common(3)]
    return notes


def _mark_of(digest: str) -> Text:
    """The beginning of a digest as four colours, so that equal digests look equal."""
    text = Text()
    for digit in digest[:4]:
        text.append("■", MARK_COLOURS[int(digit, 16) % len(MARK_COLOURS)])
    return text


def _line_of(happening: Happening) -> Text:
    when = datetime.fromtimestamp(happening.at).strftime("%H:%M:%S ")
    return Text.assemble((when, "dim"), f"…{happening.peer} {happening.what}")


def show(take: Callable[[], Snapshot], console: Console, stop: threading.Event) -> None:
    """Draw snapshots until `stop` is set, or Ctrl-C."""
    losses = LossBars()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while not stop.is_set():
            snapshot = take()
            losses.add(snapshot)
            live.update(screen(snapshot, losses), refresh=True)
            stop.wait(REFRESH_SECONDS)
