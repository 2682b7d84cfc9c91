"""``shoal doctor`` from arguments to exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.doctor.finding import Check, Level
from shoal.cli.doctor.machine import look_at_machine
from shoal.cli.doctor.peer import Asked, look_at_peer
from shoal.health.record import printable

MARKS = {Level.WELL: ("well", "green"), Level.MIND: ("mind", "yellow"), Level.STOPS: ("STOPS", "bold red")}


def run_doctor(asked: Asked | None, port: int, console: Console, *, as_json: bool) -> int:
    """Check this machine, and the peer and run in `asked`; print the findings.

    Args:
        asked: the peer and the run to check; None to check this machine only.
        port: the TCP port at which the peer would listen; 0 for any.
        console: where to print.
        as_json: print one JSON object instead of text.

    Returns:
        The exit code: 1 if something stops this machine from taking part, else 0.

    Raises:
        ValueError: if an address, a membership or an identity is invalid.
        OSError: if the identity's file can't be read.
    """
    findings = asyncio.run(_all(asked, port, None if as_json else console))
    stops = [finding for finding in findings if finding.level is Level.STOPS]
    if as_json:
        report = {"well": not stops, "findings": [finding.as_json() for finding in findings]}
        console.print_json(json.dumps(report))
    else:
        console.print(_summary(findings, stops, asked), markup=False)
    return 1 if stops else 0


async def _all(asked: Asked | None, port: int, console: Console | None) -> list[Check]:
    findings = []
    async for finding in _look(asked, port):
        findings.append(finding)
        if console is not None:
            console.print(_row(finding))
    return findings


async def _look(asked: Asked | None, port: int) -> AsyncIterator[Check]:
    for finding in look_at_machine(port):
        yield finding
    if asked is not None:
        async for finding in look_at_peer(asked, port):
            yield finding


def _row(finding: Check) -> Table:
    word, style = MARKS[finding.level]
    row = Table.grid(padding=(0, 1))
    row.add_column(width=5)
    row.add_column(width=18)
    row.add_column(overflow="fold")
    found, advice = (printable(text, len(text.encode())) for text in (finding.found, finding.advice))
    row.add_row(Text(word, style), Text(finding.name), Text(found))  # plain text: peers may have written parts of it
    if advice:
        row.add_row("", "", Text(advice, "dim"))
    return row


def _summary(findings: list[Check], stops: list[Check], asked: Asked | None) -> str:
    if stops:
        return f"Not ready: {', '.join(finding.name for finding in stops)}."
    minded = [finding.name for finding in findings if finding.level is Level.MIND]
    first = f"Ready; mind {', '.join(minded)}." if minded else "Ready."
    if asked is None:
        return f"{first} With the address of a peer, `shoal doctor ADDRESS` looks at the way to it, too."
    return first
