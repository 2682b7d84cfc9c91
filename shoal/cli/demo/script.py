"""What happens in the demo, and when: it starts the peers, kills one, starts a newcomer, and stops them all."""

from __future__ import annotations

import os
import pkgutil
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import nan
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

from rich.console import Console

# After this many epochs, the model is better than a bigram model (after 40 it is just better), and a newcomer has had
# time to start and take part, even on a slow machine.
ENOUGH_EPOCHS = 60
# Nobody else is in the demo's DHT. The parent does not import torch, which a peer needs.
RUN, PEER = "demo", "shoal.cli.demo.peer:run_peer"
STALL_SECONDS, ORDERLY_SECONDS, LINES_EVERY = 60.0, 20.0, 10


class GradientCodec(StrEnum):
    """The codec of the averaged gradients."""

    NONE = "none"
    FLOAT16 = "float16"


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The user's choices for one ``shoal demo``. Raises ``ValueError`` for choices that cannot be run."""

    out: Path
    peers: int = 4
    epochs: int = 150
    kill: bool = True
    compression: GradientCodec = GradientCodec.NONE
    seed: int = 0
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.peers < 1 or (self.kill and self.peers < 2):
            raise ValueError(f"--peers {self.peers} leaves nobody to train; use 2 or more, or 1 with --no-kill")
        if self.epochs < 10:
            raise ValueError(f"--epochs {self.epochs} leaves no time for a newcomer; use 10 or more")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} is negative; use 0 or more")


def load_text(data: Path | None = None, most: int = 4_000_000) -> tuple[bytes, bytes]:
    """Nine of ten passages of a text to train on, and each tenth passage, which is held out.

    The text is at most ``most`` bytes of the file ``data``, or of the packages of Python's own standard library, which
    every machine that can run the demo has. Every peer process reads it for itself. All use the same interpreter, so
    they get the same text in the same order. Raises ``ValueError`` for a text that is too short.
    """
    library, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in [data] if data else sorted(library.glob("*/*.py")):
        if len(text) < most:
            with path.open("rb") as file:
                text += file.read(most - len(text))
    if len(text) < 20_000:
        raise ValueError(f"{data} holds {len(text)} bytes, and the demo needs 20000 or more; choose a longer --data")
    size = len(text) // 100
    train = b"".join(text[at : at + 9 * size] for at in range(0, len(text), 10 * size))
    return train, b"".join(text[at : at + size] for at in range(9 * size, len(text), 10 * size))


class PeerState(Enum):
    """Where a peer process is in its life. The demo kills one on purpose, and those that fail."""

    STARTING, TRAINING, FINISHED, KILLED = range(4)


STATES = {"ready": PeerState.TRAINING, "finished": PeerState.FINISHED}


class Child:
    """A peer process."""

    def __init__(self, index: int, peer: str, addresses: list[str], settings: DemoSettings) -> None:
        kind = "peer" if index < settings.peers else "newcomer"
        self.name, self.log, self.state = f"{kind} {index}", settings.out / f"peer-{index}.log", PeerState.STARTING
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.turns = context.Semaphore(0)  # it takes one to begin, and one to end
        given = (peer, self.log, theirs, self.turns, index, addresses, settings)
        self.process = context.Process(target=_begin, args=given, daemon=True)
        self.process.start()
        theirs.close()


def _begin(peer: str, log: Path, *given: Any) -> None:
    """What it prints goes to its log, a Ctrl-C in the terminal reaches only its parent, and it ends with its parent."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pkgutil.resolve_name(peer)(*given)


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


class Demo:
    """One run.

    Peer 0 is started first, and the others dial it. It evaluates, and is never killed. The last of the first peers is
    killed when two fifths of the epochs are committed, and a newcomer is started after three fifths.

    Args:
        settings: the user's choices.
        console: shows what happens.
        peer: the name of what a peer process runs.

    Attributes:
        told: what the peers have told, by what it is about: when, who, and details.
        killed_at: when a peer was killed on purpose, in seconds of ``time.monotonic()``, or nan.
    """

    def __init__(self, settings: DemoSettings, console: Console, peer: str = PEER) -> None:
        self.settings, self._console, self._peer = settings, console, peer
        self.started_at, self.killed_at = time.monotonic(), nan
        self.children: list[Child] = []
        self.told: dict[str, list[tuple[float, Child, Any]]] = defaultdict(list)
        self.failures: list[str] = []

    def run(self) -> None:
        """Run until all living peers have finished, no peer is alive, or nothing was committed for a minute.

        No process that it has started outlives it.
        """
        try:
            self._listen()
            there = [child for child in self.children if child.state is PeerState.FINISHED]
            for child in there:
                child.turns.release()
            for child in there:
                child.process.join(ORDERLY_SECONDS)
                if child.process.exitcode != 0:
                    self._fail(child, f"did not stop in good order, exit code {child.process.exitcode}")
        finally:
            for child in self.children:
                child.process.kill()
                child.process.join()

    def _story(self) -> Iterator[Callable[[], bool]]:
        """What the demo does; it goes on when what it yields is true."""
        epochs = self.settings.epochs
        first = [self._start([])]
        yield lambda: bool(self.told["listens"])
        addresses = self.told["listens"][0][2]
        self._note(f"watch it: shoal top {RUN} --initial-peers {addresses[0]}")
        first += [self._start(addresses) for _ in range(1, self.settings.peers)]
        yield lambda: all(child.state is not PeerState.STARTING for child in first)
        self._note("training begins")
        for child in first:
            child.turns.release()
        yield lambda: any(report["epoch"] >= epochs * 2 // 5 for *_, report in self.told["EpochReport"])
        victim = first[-1]
        if self.settings.kill and victim.state is PeerState.TRAINING:
            victim.state, self.killed_at = PeerState.KILLED, time.monotonic()
            victim.process.kill()
            self._note(
                f"killed {victim.name} (process {victim.process.pid}) with SIGKILL after epoch {epochs * 2 // 5}"
            )
        yield lambda: any(report["epoch"] >= epochs * 3 // 5 for *_, report in self.told["EpochReport"])
        newcomer = self._start(addresses)
        yield lambda: newcomer.state is PeerState.TRAINING
        newcomer.turns.release()
        yield lambda: False

    def _start(self, addresses: list[str]) -> Child:
        child = Child(len(self.children), self._peer, addresses, self.settings)
        self.children.append(child)
        self._note(f"started {child.name} (process {child.process.pid})")
        return child

    def _listen(self) -> None:
        """Tell the story by what the peers tell, until none of them trains."""
        story, heard_at = self._story(), time.monotonic()
        is_due = next(story)
        while busy := [child for child in self.children if child.state in (PeerState.STARTING, PeerState.TRAINING)]:
            pipes = {child.pipe: child for child in self.children if child.state is not PeerState.KILLED}
            for pipe in connection.wait(list(pipes), 0.5):
                child = pipes[pipe]  # type: ignore[index]
                try:
                    what, at, details, text = child.pipe.recv()
                except (EOFError, OSError):
                    child.process.join()
                    last = child.log.read_text(errors="replace").strip().rpartition("\n")[2] or "its log is empty"
                    self._fail(child, f"ended with exit code {child.process.exitcode}: {last}")
                    continue
                self.told[what].append((at, child, details))
                heard_at = at
                if text and (what != "EpochReport" or details["epoch"] % LINES_EVERY == 0):
                    self._note(f"{child.name}: {text}")
                child.state = STATES.get(what, child.state)
            while is_due():
                is_due = next(story)
            for child in busy if time.monotonic() - heard_at > STALL_SECONDS else ():
                self._fail(child, f"is stopped: for {STALL_SECONDS:.0f} s nothing was committed")

    def _fail(self, child: Child, how: str) -> None:
        child.state = PeerState.KILLED
        child.process.kill()
        self.failures.append(f"{child.name} {how}")
        self._note(self.failures[-1])

    def _note(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self.started_at:6.1f} s  {text}", soft_wrap=True)
