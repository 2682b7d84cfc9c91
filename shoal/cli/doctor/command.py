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
from shoal.dht.records import get_dht_time
from shoal.health.record import PERIOD_SECONDS
from shoal.monitor.snapshot import Snapshot
from shoal.monitor.watcher import Watcher
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.multiaddr import Multiaddr

MARKS = {Level.GOOD: Text("✓", "green"), Level.POOR: Text("!", "yellow"), Level.BAD: Text("✗", "bold red")}
READY_SECONDS = 20.0
CLOCKS_DIFFER = 5.0  # seconds, without being told


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


def judge_clocks(ages: list[float]) -> list[Finding]:
    """Whether this machine's clock is that of the peers, from how old their records seem here: 0 to 10 s if so."""
    if not ages:
        return []
    youngest = min(ages)
    if -CLOCKS_DIFFER < youngest < PERIOD_SECONDS + CLOCKS_DIFFER:
        return [Finding("clocks", Level.GOOD, "this machine's clock is that of the peers, to some seconds")]
    way = "of two clocks that differ by a minute, peers do not find each other: set the one that is wrong"
    where = f"{-youngest:.0f} s behind" if youngest < 0 else f"{youngest - PERIOD_SECONDS:.0f} s or more ahead of"
    return [Finding("clocks", Level.POOR, f"this machine's clock is {where} those of the peers", way)]


def examine_run(address: Multiaddr, run_id: str) -> list[Finding]:
    """Read what the peers of a run say of themselves."""
    try:
        with shoal.DHT([address], client_mode=True, start=True) as dht, Watcher(dht, run_id) as watcher:
            watcher.wait_until_ready(READY_SECONDS)
            ages = [get_dht_time() - health.at for _, health in watcher.records()]
            return [*judge_run(watcher.snapshot(), version("shoal")), *judge_clocks(ages)]
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
