"""What happens in the demo, and when: it starts the peers, kills one, starts a newcomer, and stops them all."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.demo.live import LiveScreen
from shoal.cli.demo.settings import DemoSettings

STALL_SECONDS, ORDERLY_SECONDS, LINES_EVERY = 60.0, 20.0, 10


class PeerState(Enum):
    """Where a peer process is in its life. The demo kills one on purpose."""

    STARTING, TRAINING, FINISHED, KILLED, FAILED = range(5)


class Child:
    """A peer process. Times are in seconds of ``time.monotonic()``."""

    def __init__(self, name: str, peer: Callable[..., None], log: Path, *given: Any) -> None:
        self.name, self.log, self.started_at, self.state = name, log, time.monotonic(), PeerState.STARTING
        self.killed_at: float | None = None
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(peer, log, theirs, *given), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def is_there(self) -> bool:
        """Whether it was neither killed nor has failed."""
        return self.state not in (PeerState.KILLED, PeerState.FAILED)

    def say(self) -> None:
        """Let it go on."""
        with suppress(BrokenPipeError):  # it has ended
            self.pipe.send(None)


def _begin(peer: Callable[..., None], log: Path, *given: Any) -> None:
    """What it prints goes to its log, and a Ctrl-C in the terminal reaches only its parent."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    peer(*given)


def real_peer(*given: Any) -> None:
    """A peer with torch, which the parent does not import."""
    from shoal.cli.demo.peer import run_peer

    run_peer(*given)


class Demo:
    """One run. It is a context manager, and no process that it has started outlives the context.

    Peer 0 is started first, and the others dial it. It evaluates, and is never killed. The last of the first peers is
    killed when two fifths of the epochs are committed, and a newcomer is started after three fifths.

    Args:
        settings: the user's choices.
        console: shows what happens.
        peer: what a peer process runs.

    Attributes:
        told: what the peers have told, by what it is about: when, who, and details.
    """

    def __init__(self, settings: DemoSettings, console: Console, peer: Callable[..., None] = real_peer) -> None:
        self.settings, self._console, self._peer = settings, console, peer
        self.run_id, self.started_at = f"demo-{secrets.token_hex(4)}", time.monotonic()
        self.children: list[Child] = []
        self.told: dict[str, list[tuple[float, Child, Any]]] = defaultdict(list)
        self.failures: list[str] = []
        self._screen = LiveScreen(console)
        self._shown = 0  # the last epoch that was shown

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self._note("interrupted: stopping every peer")
        self._screen.close()
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.process.join()

    def run(self) -> None:
        """Run until all living peers have finished, no peer is alive, or nothing was committed for a minute."""
        self._start("peer", [])
        heard_at = time.monotonic()
        while busy := [child for child in self.children if child.is_there and child.state is not PeerState.FINISHED]:
            pipes = {child.pipe: child for child in self.children if child.is_there}
            for pipe in connection.wait(list(pipes), 0.5):
                child = pipes[pipe]  # type: ignore[index]
                try:
                    what, at, details = child.pipe.recv()
                except (EOFError, OSError):
                    child.process.join()
                    words = child.log.read_text(errors="replace").strip().splitlines()[-3:]
                    last = " / ".join(map(str.strip, words)) or "it wrote nothing to its log"
                    self._fail(child, f"ended with exit code {child.process.exitcode}: {last}")
                    continue
                self.told[what].append((at, child, details))
                heard_at = heard_at if what == "trained" else time.monotonic()
                self._act(what, child, details)
            for child in busy if time.monotonic() - heard_at > STALL_SECONDS else ():
                self._fail(child, f"is stopped: for {STALL_SECONDS:.0f} s nothing was committed")
            self._screen.draw()
        self._screen.close()
        there = [child for child in self.children if child.is_there]
        for child in there:
            child.say()
        for child in there:
            child.process.join(ORDERLY_SECONDS)
            if child.process.exitcode != 0:
                self._fail(child, f"did not stop in good order, exit code {child.process.exitcode}")

    def _start(self, kind: str, addresses: list[str]) -> None:
        index = len(self.children)
        log = Path(self.settings.out, f"peer-{index}.log")
        child = Child(f"peer {index}", self._peer, log, index, self.run_id, addresses, self.settings)
        self.children.append(child)
        self._note(f"started {kind} {index} (process {child.process.pid})")

    def _act(self, what: str, child: Child, details: Any) -> None:
        """Act on what that peer has told."""
        settings, first = self.settings, self.children[: self.settings.peers]
        match what:
            case "listens" if child is first[0]:
                self._note(f"{child.name} listens on {details[1]}")
                for _ in range(1, settings.peers):
                    self._start("peer", details[1:])
            case "ready":
                child.state = PeerState.TRAINING
                if child not in first:
                    child.say()
                elif len(first) == settings.peers and all(one.state is not PeerState.STARTING for one in first):
                    self._note("training begins")
                    self._screen.open(self.run_id, self.told["listens"][0][2][1:])
                    for one in first:
                        one.say()
            case "finished":
                child.state = PeerState.FINISHED
            case "evaluated":
                self._note(f"held-out loss {details[1]:.3f} at epoch {details[0]}")
            case "EpochReport":
                self._committed(details["epoch"], first[-1])
            case "DownloadReport":
                size = f"{details['bytes'] / 1e6:.1f} MB from {details['donors']} peers in {details['seconds']:.2f} s"
                self._note(f"{child.name} downloaded the state of epoch {details['epoch']}: {size}")

    def _committed(self, epoch: int, victim: Child) -> None:
        settings = self.settings
        if settings.kill and epoch >= settings.epochs * 2 // 5 and victim.state is PeerState.TRAINING:
            victim.state, victim.killed_at = PeerState.KILLED, time.monotonic()
            victim.process.kill()
            self._note(f"killed {victim.name} (process {victim.process.pid}) with SIGKILL after epoch {epoch}")
        if epoch >= settings.epochs * 3 // 5 and len(self.children) == settings.peers:
            self._start("newcomer", self.told["listens"][0][2][1:])
        # An epoch is shown after the next one has begun: then all peers have told of it.
        if (epoch - 1) // LINES_EVERY > self._shown // LINES_EVERY:
            self._shown = epoch - 1
            self._show(epoch - 1)

    def _show(self, epoch: int) -> None:
        of, names = self.settings.epochs, {peer[0]: child.name for _, child, peer in self.told["listens"]}
        reports = [report for _, _, report in self.told["EpochReport"] if report["epoch"] == epoch]
        for longest in sorted(reports, key=lambda report: -report["round_seconds"])[:1]:
            self._note(
                f"epoch {epoch} of {of}: {longest['num_peers']} peers, {longest['samples']:.0f} samples, "
                f"coordinator {names.get(longest['coordinator'], longest['coordinator'][:12])}, "
                f"round {longest['round_seconds']:.2f} s (matchmaking {longest['matchmaking_seconds']:.3f}, "
                f"all-reduce {longest['allreduce_seconds']:.2f}), "
                f"{sum(report['bytes_sent'] for report in reports) / 1e6:.1f} MB moved"
            )
        latest = {child: told for _, child, told in self.told["trained"]}
        for child in self.children:
            if child.state is PeerState.TRAINING and child in latest:
                _, loss, speed = latest[child]
                self._note(f"  {child.name}: loss {loss:.3f}, {speed:.0f} samples/s")

    def _fail(self, child: Child, how: str) -> None:
        child.state = PeerState.FAILED
        child.process.kill()
        self.failures.append(f"{child.name} {how}")
        self._note(self.failures[-1])

    def _note(self, text: str) -> None:
        line = f"{time.monotonic() - self.started_at:6.1f} s  {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
