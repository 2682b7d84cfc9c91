"""``shoal doctor`` from arguments to exit code."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import shoal
from shoal.cli.doctor.finding import Finding, Level
from shoal.cli.doctor.machine import examine
from shoal.cli.doctor.peer import examine_peer
from shoal.monitor.snapshot import Snapshot
from shoal.monitor.watcher import Watcher
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.multiaddr import Multiaddr

MARKS = {Level.GOOD: Text("✓", "green"), Level.POOR: Text("!", "yellow"), Level.BAD: Text("✗", "bold red")}
READY_SECONDS = 20.0


def judge_run(snapshot: Snapshot, release: str) -> list[Finding]:
    """How a run is that this machine wants to join with that release of Shoal."""
    found = [Finding("run", Level.GOOD if snapshot.is_well else Level.POOR, snapshot.sentence)]
    theirs = sorted({peer.version for peer in snapshot.peers})
    if theirs:
        says = f"its peers run {', '.join(theirs)}; here is {release}"
        if release in theirs:
            found.append(Finding("version", Level.GOOD, says))
        else:
            found.append(Finding("version", Level.POOR, says, f"pip install shoal=={theirs[-1]}"))
    return found


def examine_run(address: Multiaddr, run_id: str) -> list[Finding]:
    """Read what the peers of a run say of themselves."""
    try:
        with shoal.DHT([address], client_mode=True, start=True) as dht, Watcher(dht, run_id) as watcher:
            watcher.wait_until_ready(READY_SECONDS)
            return judge_run(watcher.snapshot(), version("shoal"))
    except ValueError as error:  # a closed run
        return [Finding("run", Level.POOR, str(error), "shoal top, with --identity and --membership, shows it")]
    except PeerUnreachable as error:
        return [Finding("run", Level.BAD, str(error), "give an address of a peer of the run")]


def run_doctor(address: str | None, run_id: str | None, console: Console, *, json: bool) -> int:
    """Look, print, and return the exit code: 1 if something would stop this machine from taking part.

    Raises:
        ValueError: if the address is none, or does not end in a peer id.
    """
    where = None if address is None else Multiaddr(address)
    if where is not None and where.peer_id is None:
        raise ValueError(f"{address} does not say who answers there: it must end in /p2p/<peer id>")
    found = examine()
    if where is not None:
        found += examine_peer(where)
        if run_id is not None and all(finding.level is not Level.BAD for finding in found):
            found += examine_run(where, run_id)
    is_bad = any(finding.level is Level.BAD for finding in found)
    if json:
        typer.echo(msgspec.json.encode({"ok": not is_bad, "findings": found}).decode())
        return int(is_bad)
    table = Table.grid(padding=(0, 1))
    for finding in found:
        says = Text(finding.says)
        if finding.way_out:
            says.append(f"\n→ {finding.way_out}", "italic")
        table.add_row(MARKS[finding.level], Text(finding.about, "bold"), says)
    console.print(table)
    return int(is_bad)
