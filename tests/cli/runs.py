"""Made-up runs for the tests of what a run comes to."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from shoal.cli.demo.report import write_report
from shoal.cli.demo.script import Child, Demo, DemoSettings, PeerState
from tests.cli.fake_peer import report_of

EPOCHS = 20


def settings(out: Path, *, kill: bool = True, epochs: int = EPOCHS) -> DemoSettings:
    """Four peers, 20 epochs: the kill comes with epoch 8, the newcomer with epoch 12."""
    return DemoSettings(out=out, epochs=epochs, kill=kill)


def good_run(given: DemoSettings) -> Demo:
    """One epoch a second; peer 3 is killed at 108.1 and the next epoch comes at 109.6; peer 4 comes at 112."""
    demo = Demo(given, Console(file=io.StringIO(), markup=False))
    for index in range(5):
        child: Any = mock.Mock(spec=Child, state=PeerState.TRAINING)
        child.name = f"peer {index}"
        demo.children.append(child)
        demo.told["listens"].append((97.0, child, ["/ip4/127.0.0.1/tcp/1"]))
        demo.told["ready"].append((115.0 if index == 4 else 99.0, child, 2.4))
    first = demo.children[0]
    demo.told["evaluated"].append((99.5, first, (0, 4.6)))
    for epoch in range(EPOCHS):
        at = 100.0 + epoch + (0.6 if epoch == 9 else 0.0)
        for index in (0, 1, 2, *((3,) if epoch <= 8 else ()), *((4,) if epoch >= 17 else ())):
            demo.told["EpochReport"].append((at + index / 100, demo.children[index], report_of(epoch)))
    demo.children[3].state, demo.killed_at = PeerState.KILLED, 108.1
    demo.told["evaluated"].append((121.0, first, (given.epochs, 1.6)))
    demo.told["finished"].append((122.0, first, "def f():"))
    return demo


def forget(demo: Demo, what: str, *indices: int) -> None:
    """These peers have told nothing of that."""
    gone = [demo.children[index] for index in indices]
    demo.told[what] = [one for one in demo.told[what] if one[1] not in gone]


def reported(demo: Demo) -> tuple[list[str], str]:
    """The problems, and what is shown."""
    output = io.StringIO()
    return write_report(demo, Console(file=output, width=120, markup=False)), output.getvalue()
