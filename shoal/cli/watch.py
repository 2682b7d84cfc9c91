"""``shoal top`` from arguments to exit code, and the code that it shares with ``shoal monitor``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

import shoal
from shoal.cli.watched import Watched
from shoal.membership import ClosedRun
from shoal.monitor.top import LossBars, as_json, screen, show
from shoal.monitor.watcher import Watcher
from shoal.p2p.errors import PeerUnreachable

READY_SECONDS = 20.0


@contextmanager
def watching(run: Watched) -> Iterator[Watcher]:
    """A context with a watcher of that run, which has read all records once. Ends the command if the run can't be
    watched."""
    try:
        if ClosedRun.of(run.run_id) is not None and None in (run.identity, run.membership):
            # Without a file, each start has a new peer id, which the owner can't admit.
            raise ValueError(
                f"{run.run_id} is a closed run: give --identity FILE, and --membership with the line that its owner "
                f"gets from `shoal keys admit {run.run_id} PEER --role watch`, where `shoal keys peer FILE` prints PEER"
            )
        with (
            shoal.DHT(run.initial_peers, client_mode=True, start=True, identity_path=run.identity) as dht,
            Watcher(dht, run.run_id, membership=run.membership) as watcher,
        ):
            watcher.wait_until_ready(READY_SECONDS)
            yield watcher
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (PeerUnreachable, OSError) as error:
        typer.echo(f"the run can't be watched: {error}", err=True)
        raise typer.Exit(1) from error


def run_top(run: Watched, console: Console, *, once: bool, json: bool) -> int:
    """Show the run, once or until Ctrl-C. Returns the exit code."""
    with watching(run) as watcher:
        if not once:
            try:
                show(watcher.snapshot, console, threading.Event())
            except KeyboardInterrupt:
                console.print("stopped")
            return 0
        snapshot = watcher.snapshot()
        if json:
            typer.echo(as_json(snapshot))
        else:
            console.print(screen(snapshot, LossBars()))
        return 0 if snapshot.is_well else 1
