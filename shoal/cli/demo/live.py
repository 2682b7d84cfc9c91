"""In a terminal: the screen of ``shoal top``, from the health records that the peers publish."""

from __future__ import annotations

import time
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live

import shoal
from shoal.monitor.top import REFRESH_SECONDS, LossBars, screen
from shoal.monitor.watcher import Watcher


class LiveScreen(ExitStack):
    """A context in which the screen is drawn below what is printed, from ``open`` on. Elsewhere than in a terminal it
    does nothing."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._losses, self._drawn_at = console, LossBars(), 0.0
        self._watcher: Watcher | None = None

    def open(self, run_id: str, addresses: list[str]) -> None:
        """The run has begun."""
        if self._console.is_terminal:
            dht = self.enter_context(shoal.DHT(addresses, client_mode=True, start=True))
            self._watcher = self.enter_context(Watcher(dht, run_id))
            self._live = self.enter_context(Live(console=self._console, auto_refresh=False))

    def draw(self) -> None:
        """Draw the screen, at most once a second."""
        if self._watcher is not None and time.monotonic() - self._drawn_at > REFRESH_SECONDS:
            snapshot, self._drawn_at = self._watcher.snapshot(), time.monotonic()
            self._losses.add(snapshot)
            self._live.update(screen(snapshot, self._losses), refresh=True)
