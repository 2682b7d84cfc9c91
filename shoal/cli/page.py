"""``shoal monitor`` from arguments to exit code."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from shoal.cli.watch import watching
from shoal.cli.watched import Watched
from shoal.monitor.history import RunHistory
from shoal.monitor.serve import listen, serve
from shoal.monitor.web import Site


def run_monitor(run: Watched, port: int, history: Path | None, console: Console) -> int:
    """Serve the page until Ctrl-C. Returns the exit code."""
    file = history or Path("runs") / f"monitor-{quote(run.run_id, safe='@')}.sqlite"
    with watching(run) as watcher, RunHistory(file, run.run_id) as kept, listen(port) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        said = f"The run is shown at {address} until Ctrl-C; its history is kept in {file}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        try:
            serve(Site(watcher, kept), listening)
        except KeyboardInterrupt:
            console.print("stopped")
    return 0
