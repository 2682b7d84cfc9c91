"""The replicas of one system in a run of `benchmarks.goodput`, and what is done to them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.goodput_figures import SLOWED, Fault, Life, Line
from benchmarks.places import Place
from benchmarks.processes import Worker, WorkerError

# torchft's, in ms, ms and s: the best of six that were tried with kills, stops and slow replicas.
HEARTBEAT, JOIN, LIMIT = 1000, 3000, 1.5
STEP_SECONDS, WIDTH = 0.1, 1024
IMPORT_SECONDS, START_SECONDS, END_SECONDS = 60.0, 90.0, 10.0
_LIGHTHOUSE_PORT = 29510

T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """A system: its name in the report, its worker, its interpreter, and a tree with these benchmarks."""

    name: str
    system: str
    python: str
    tree: Path


class Replicas:
    """Replicas that are forked from one process which has imported their library; all end with the `with` block.

    Args:
        side: the system.
        mode: how they train.
        places: where they live, one each; and last, where torchft's lighthouse does.
        folder: for their traces and logs.

    Attributes:
        lives: all processes that were started.
        ended: how many ended by themselves.
        began: when the first one was started, in Unix seconds.
    """

    def __init__(self, side: Side, mode: str, places: Sequence[Place], folder: Path) -> None:
        self.lives: list[Life] = []
        self.ended = 0
        *self._places, place = places
        self._folder, self._now = folder, dict[int, int]()  # the process of each replica
        self._afflicted: dict[int, tuple[Fault, float]] = {}  # by replica, and since when
        self._given = {
            "mode": mode,
            "replicas": len(self._places),
            "folder": str(folder),
            "width": WIDTH,
            "seconds": STEP_SECONDS,
            "slowed": SLOWED,
            "limit": LIMIT,
        }
        self._trace = (folder / "driver.jsonl").open("w", buffering=1)
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            opening.callback(self._trace.close)
            self._lighthouse = []
            if side.system == "torchft":
                self._lighthouse = [opening.enter_context(_lighthouse(side.python, place, folder))]
            module, log = "benchmarks.workers.goodput_nursery", folder / "nursery.log"
            variables = {"RUST_LOG": "warn"}
            self._nursery = Worker(side.python, module, [side.system], log, side.tree, variables=variables)
            opening.callback(self._nursery.stop, 0.0)
            self._first(IMPORT_SECONDS)
            self._open = opening.pop_all()

    def _first(self, timeout: float) -> None:
        """Start them all: the others when the first one can be reached."""
        self.start(0, timeout)
        self.began = self.lives[0].forked
        if not self._lighthouse:
            _wait_for(lambda: self._contacts(but=-1), START_SECONDS, "the first replica")
        for replica in range(1, len(self._places)):
            self.start(replica)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        for process in self._now.values():
            os.close(process)

    def start(self, replica: int, timeout: float = START_SECONDS) -> None:
        """Fork a replica, or the successor of one that is dead."""
        number = sum(life.replica == replica for life in self.lives)
        name, place = f"r{replica}", self._places[replica]
        given = {"replica": name, "life": number, "address": place.address}
        given["contacts"] = self._lighthouse or self._contacts(but=replica)
        log = str(self._folder / f"{name}.{number}.log")
        pid, forked = self._nursery.ask("fork", timeout, place=astuple(place), log=log, given=self._given | given)
        self.lives.append(Life(replica, number, forked))
        self._now[replica] = os.pidfd_open(pid)

    def _contacts(self, but: int) -> list[str]:
        """Addresses of the other replicas."""
        now = {life.replica: life.number for life in self.lives}
        files = [self._folder / f"r{replica}.{number}.contact" for replica, number in now.items() if replica != but]
        return [address for file in files if file.exists() for address in json.loads(file.read_text())]

    # -- faults

    def strike(self, fault: Fault) -> None:
        """A fault begins."""
        replica, name = fault.replica, f"r{fault.replica}"
        match fault.kind.act:
            case "kill":
                self._signal(replica, signal.SIGKILL)
                self._bury(replica)
                return
            case "stop":
                self._signal(replica, signal.SIGSTOP)
            case "slow":
                (self._folder / f"{name}.slow").touch()
            case "cut":
                self._places[replica].cut()
        self._afflicted[replica] = fault, time.time()

    def relieve(self, replica: int) -> None:
        """A replica's fault ends."""
        fault, since = self._afflicted.pop(replica)
        match fault.kind.act:
            case "stop":
                self._signal(replica, signal.SIGCONT)
                self._tell(replica, "stopped", seconds=time.time() - since)
            case "slow":
                (self._folder / f"r{replica}.slow").unlink()
            case "cut":
                self._places[replica].heal()

    def relieve_all(self) -> None:
        """No replica has a fault any more."""
        for replica in list(self._afflicted):
            self.relieve(replica)

    def tend(self) -> None:
        """End the faults whose time is over, and start successors of replicas that ended by themselves."""
        for replica, (fault, since) in list(self._afflicted.items()):
            if time.time() >= since + fault.kind.seconds:
                self.relieve(replica)
        for replica, process in list(self._now.items()):
            if _is_dead(process, 0.0):
                self.ended += 1
                self._bury(replica)

    def _signal(self, replica: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(self._now[replica], number)

    def _bury(self, replica: int) -> None:
        """A replica's process is dead, or about to be: what it had computed is lost, and a successor is started."""
        at, process = time.time(), self._now.pop(replica)
        if not _is_dead(process, END_SECONDS):
            raise WorkerError(f"r{replica} does not die")
        os.close(process)
        number = max(life.number for life in self.lives if life.replica == replica)
        pending = self._folder / f"r{replica}.{number}.pending"
        if pending.exists() and (samples := float(pending.read_text() or 0.0)):
            self._tell(replica, "lost", samples=samples, reason="killed")
        self.start(replica)
        self._tell(replica, "dead", seconds=time.time() - at)

    def _tell(self, replica: int, event: str, **fields: Any) -> None:
        self._trace.write(json.dumps({"time": time.time(), "replica": f"r{replica}", "event": event} | fields) + "\n")

    # -- what they have written

    def lines(self) -> list[Line]:
        """All lines of all traces until now, each with the number of the life that wrote it."""
        return read(self._folder)

    def wait_until_whole(self) -> float:
        """Wait for the first step that all have made together. Returns its time."""
        everybody = len(self._places)
        return self._wait_for_step("a step of all replicas", START_SECONDS, lambda line: line["peers"] == everybody)

    def wait_for_step(self, after: float) -> None:
        """Wait for a step after that time, but not for ever: a training that stands still is measured, too."""
        with contextlib.suppress(WorkerError):
            self._wait_for_step("a step", END_SECONDS, lambda line: line["time"] > after)

    def _wait_for_step(self, what: str, timeout: float, is_it: Callable[[Line], bool]) -> float:
        def steps() -> list[float]:
            self.tend()
            return [line["time"] for line in self.lines() if line["event"] == "step" and is_it(line)]

        return min(_wait_for(steps, timeout, what))


def read(folder: Path) -> list[Line]:
    """The lines of the traces in a folder, but for one that is being written; each with the number of its life."""
    found = []
    for path in folder.glob("*.jsonl"):
        _, _, life = path.stem.partition(".")
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                found.append(json.loads(text) | {"life": int(life or -1)})
    return found


def _is_dead(process: int, timeout: float) -> bool:
    return bool(select.select([process], [], [], timeout)[0])


def _wait_for(condition: Callable[[], list[T]], timeout: float, what: str) -> list[T]:
    """What the condition returns as soon as it holds; raises `WorkerError`."""
    until = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > until:
            raise WorkerError(f"{what}: nothing in {timeout:g} s")
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def _lighthouse(python: str, place: Place, folder: Path) -> Iterator[str]:
    """torchft's lighthouse; gives its address."""
    within = ["ip", "netns", "exec", place.namespace] if place.namespace else []
    address = f"{place.address}:{_LIGHTHOUSE_PORT if place.namespace else _free_port()}"
    options = ["--bind", address, "--min_replicas", "1", "--quorum_tick_ms", "100"]
    options += ["--join_timeout_ms", str(JOIN), "--heartbeat_timeout_ms", str(HEARTBEAT)]
    command = [*within, str(Path(python).with_name("torchft_lighthouse")), *options]
    with (folder / "lighthouse.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"RUST_LOG": "warn"})
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
