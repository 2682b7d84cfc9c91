"""Four peers of one library in four processes, made to average at the same moment, and what each round took."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, PeakMemory, Worker, WorkerError, cpu_seconds, pss_bytes

PEERS = 4
OPEN_TIMEOUT = 90.0  # seconds for imports and for a peer to be ready
ROUND_TIMEOUT = 60.0
PATIENCE, IMPATIENCE = 20.0, 2.0  # seconds for peers to close by themselves, after success and after failure
RETRIES = 4  # of a warm-up: hivemind at times forms two groups
LEAD = 0.1  # seconds between the command and the moment at which all peers begin


@dataclass(frozen=True)
class Round:
    """One round of a group. Times in seconds, of the slowest peer; CPU time of all peers and all that they started."""

    seconds: float  # from the moment at which all peers begin to the moment at which the last has returned
    matchmaking: float
    allreduce: float
    cpu_seconds: float
    join_to_begin: float | None  # last JOIN to BEGIN, where the library tells
    bytes_sent: int | None  # of all peers
    identical: bool  # whether all peers hold the same bits
    failure: str | None  # why the round does not count; then the times mean nothing

    @classmethod
    def failed(cls, failure: str) -> Round:
        """One without figures."""
        return cls(0.0, 0.0, 0.0, 0.0, None, None, False, failure)


@dataclass(frozen=True)
class Memory:
    """PSS of all peers of a swarm, in bytes: between rounds, and the largest sample within one."""

    idle: int
    peak: int


class Swarm:
    """The peers of one library, alive from construction to the end of the `with` block; `addresses` are those of
    each."""

    def __init__(
        self, python: str, module: str, elements: int, arguments: Sequence[str], logs: Path, tree: Path = ROOT
    ) -> None:
        self._workers: list[Worker] = []
        try:
            for rank in range(PEERS):
                log = logs / f"{tree.name}-{module}-{'-'.join(arguments)}-{rank}.log"
                self._workers.append(Worker(python, module, [str(rank), str(elements), *arguments], log, tree))
            self.addresses = [self._workers[0].ask("open", OPEN_TIMEOUT, initial_peers=[])]
            for worker in self._workers[1:]:
                worker.send("open", initial_peers=self.addresses[0])
            self.addresses += [worker.receive(OPEN_TIMEOUT) for worker in self._workers[1:]]
            self._ask_all("connect", addresses=self.addresses)
        except BaseException:
            self._stop(patience=IMPATIENCE)
            raise

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._stop(PATIENCE if failure is None else IMPATIENCE)

    @property
    def _sessions(self) -> list[int]:
        return [worker.session for worker in self._workers]

    def _ask_all(self, command: str, **arguments: Any) -> list[Any]:
        for worker in self._workers:
            worker.send(command, **arguments)
        return [worker.receive(ROUND_TIMEOUT) for worker in self._workers]

    def round(self, busy: Sequence[int] = ()) -> Round:
        """Fills the vectors and averages them once; the `busy` peers also run pure Python all the while."""
        self._ask_all("fill")
        before, at = cpu_seconds(self._sessions), time.monotonic() + LEAD
        for rank, worker in enumerate(self._workers):
            worker.send("round", at=at, busy=rank in busy)
        reports = [worker.receive(ROUND_TIMEOUT) for worker in self._workers]
        spent = cpu_seconds(self._sessions) - before
        digests = self._ask_all("digest")
        failures = [report["failure"] for report in reports if "failure" in report]
        failures += [f"a group of {r['members']}" for r in reports if r.get("members", PEERS) != PEERS]
        joins = [report["join_to_begin"] for report in reports if report.get("join_to_begin") is not None]
        sent = [report["bytes_sent"] for report in reports if "bytes_sent" in report]
        return Round(
            seconds=max(report["finished"] for report in reports) - at,
            matchmaking=max(report.get("matchmaking", 0.0) for report in reports),
            allreduce=max(report.get("allreduce", 0.0) for report in reports),
            cpu_seconds=spent,
            join_to_begin=max(joins, default=None),
            bytes_sent=sum(sent) if sent else None,
            identical=len(set(digests)) == 1,
            failure="; ".join(failures) or None,
        )

    def warm_up(self, rounds: int) -> None:
        """Runs that many rounds, and more while the last one failed; raises `WorkerError` when that does not help."""
        failures = []
        for done in range(1, rounds + RETRIES + 1):
            failure = self.round().failure
            if failure is None and done >= rounds:
                return
            failures.append(failure)
        raise WorkerError(f"no round succeeds: {failures}")

    def check(self, bound: float) -> float:
        """Largest error of an element after the last round; raises `WorkerError` when it is not below the bound."""
        worst: float = max(self._ask_all("error", size=PEERS))
        if not worst < bound:
            raise WorkerError(f"the result is not the mean of the contributions: an element is wrong by {worst}")
        return worst

    def memory(self) -> Memory:
        """Measures one more round, which is not timed since sampling costs time."""
        with PeakMemory(self._sessions) as sampled:
            self.round()
        return Memory(idle=pss_bytes(self._sessions), peak=sampled.peak)

    def idle_cpu(self, seconds: float) -> float:
        """CPU seconds per second that the peers spend while nothing is asked of them."""
        before = cpu_seconds(self._sessions)
        time.sleep(seconds)
        return (cpu_seconds(self._sessions) - before) / seconds

    def kill(self) -> None:
        """Ends all peers, whatever they do."""
        self._stop(IMPATIENCE)

    def _stop(self, patience: float) -> None:
        """Ends all peers; what does not end within `patience` seconds is killed."""
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them alive
        try:
            for worker in self._workers:
                worker.hang_up()
            deadline = time.monotonic() + patience
            for worker in self._workers:
                worker.stop(patience=max(0.0, deadline - time.monotonic()))
        finally:
            signal.signal(signal.SIGINT, heard)
