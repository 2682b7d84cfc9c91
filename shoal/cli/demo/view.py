"""Shows a demo while it runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.demo.record import PeerRecord, PeerState, Record

_REFRESH_SECONDS = 0.25
_LINES_EVERY_EPOCHS = 10
_STYLES = {
    PeerState.STARTING: "yellow",
    PeerState.TRAINING: "green",
    PeerState.FINISHED: "cyan",
    PeerState.KILLED: "red",
    PeerState.FAILED: "bold red",
}


class View(Protocol):
    """Shows a run."""

    def update(self, record: Record) -> None:
        """Called after each thing that happened, and at least twice a second."""

    def note(self, text: str) -> None:
        """One line for something that does not happen in every epoch."""


class PlainView:
    """Prints lines for a log: every note, and for every tenth epoch a line for the round and one for each peer."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs
        self._started_at = time.monotonic()
        self._next_epoch = _LINES_EVERY_EPOCHS
        self._evaluations = 0

    def update(self, record: Record) -> None:
        """Prints what is new."""
        for evaluation in record.evaluations[self._evaluations :]:
            self.note(f"held-out loss {evaluation.held_out_loss:.3f} at epoch {evaluation.epoch}")
        self._evaluations = len(record.evaluations)
        # An epoch is shown after the next one has begun: then all peers have reported it.
        if record.epoch > self._next_epoch:
            epoch = record.epoch - 1
            self._next_epoch = epoch - epoch % _LINES_EVERY_EPOCHS + _LINES_EVERY_EPOCHS
            self.note(f"epoch {epoch} of {self._epochs}: {_round_line(record, epoch)}")
            for peer in record.peers.values():
                if peer.state == PeerState.TRAINING and peer.progress:
                    latest = peer.progress[max(peer.progress)]
                    self.note(f"  {peer.name}: loss {latest.loss:.3f}, {latest.samples_per_second:.0f} samples/s")

    def note(self, text: str) -> None:
        """Prints ``text`` with the time since the start."""
        line = f"{time.monotonic() - self._started_at:6.1f} s  {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A table that is drawn anew in place; notes scroll by above it."""

    def __init__(self, live: Live, epochs: int) -> None:
        self._live = live
        self._epochs = epochs
        self._started_at = time.monotonic()
        self._drawn_at = 0.0
        self._record = Record()

    def update(self, record: Record) -> None:
        """Draws the table, at most four times a second."""
        self._record = record
        if time.monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draws the table as it is now."""
        self._drawn_at = time.monotonic()
        self._live.update(_picture(self._record, self._epochs), refresh=True)

    def note(self, text: str) -> None:
        """Prints ``text`` with the time since the start, above the table."""
        elapsed = f"{time.monotonic() - self._started_at:6.1f} s  "
        self._live.console.print(Text.assemble((elapsed, "dim"), text))


@contextmanager
def open_view(console: Console, epochs: int) -> Iterator[View]:
    """The view that suits ``console``."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            view = LiveView(live, epochs)
            yield view
            view.draw()
    else:
        yield PlainView(console, epochs)


def _picture(record: Record, epochs: int) -> Group:
    table = Table(title=f"epoch {max(record.epoch, 0)} of {epochs}", title_justify="left")
    for heading in ("peer", "process", "state"):
        table.add_column(heading)
    for heading in ("epoch", "loss", "samples/s", "round", "sent / received"):
        table.add_column(heading, justify="right")
    coordinator = _latest_coordinator(record)
    for peer in record.peers.values():
        mark = " *" if peer.name == coordinator else ""
        state = Text(peer.state.value, style=_STYLES[peer.state])
        table.add_row(peer.name + mark, str(peer.pid), state, *_cells(peer))
    return Group(table, Text("* coordinator   " + _round_line(record, record.epoch)), Text(_loss_line(record)))


def _cells(peer: PeerRecord) -> tuple[str, str, str, str, str]:
    """Epoch, loss, samples per second, the last round's seconds, megabytes sent and received."""
    progress = peer.progress[max(peer.progress)] if peer.progress else None
    commit = peer.last_commit
    return (
        "" if commit is None else str(commit.epoch),
        "" if progress is None else f"{progress.loss:.3f}",
        "" if progress is None else f"{progress.samples_per_second:.0f}",
        "" if commit is None else f"{commit.round_seconds:.2f} s",
        "" if commit is None else f"{commit.bytes_sent / 1e6:.1f} / {commit.bytes_received / 1e6:.1f} MB",
    )


def _latest_coordinator(record: Record) -> str:
    reports = [peer.last_commit for peer in record.peers.values() if peer.last_commit is not None]
    latest = max(reports, key=lambda report: report.epoch, default=None)
    return record.name_of(latest.coordinator) if latest is not None else ""


def _round_line(record: Record, epoch: int) -> str:
    group = [peer.committed[epoch] for peer in record.peers.values() if epoch in peer.committed]
    if not group:
        return "no round yet"
    longest = max(group, key=lambda report: report.round_seconds)
    moved = sum(report.bytes_sent for report in group) / 1e6
    return (
        f"{longest.num_peers} peers, {longest.samples:.0f} samples, coordinator {record.name_of(longest.coordinator)}, "
        f"round {longest.round_seconds:.2f} s (matchmaking {longest.matchmaking_seconds:.3f}, "
        f"all-reduce {longest.allreduce_seconds:.2f}), {moved:.1f} MB moved"
    )


def _loss_line(record: Record) -> str:
    if record.baseline is None or not record.evaluations:
        return ""
    latest = record.evaluations[-1]
    return (
        f"held-out loss {latest.held_out_loss:.3f} at epoch {latest.epoch}; "
        f"the bigram model's is {record.baseline.bigram_loss:.3f} (nats per character)"
    )
