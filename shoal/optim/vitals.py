"""The health record of a peer, for users who watch the run. The trainer's thread gathers it, and the reactor publishes
it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

from shoal.dht.records import get_dht_time
from shoal.health.board import HealthBoard
from shoal.health.record import (
    MARK_EVERY,
    MAX_LOST,
    MAX_REASON,
    MAX_TEXT,
    MAX_UNREACHED,
    PERIOD_SECONDS,
    PREFIX_BYTES,
    FaultKind,
    Health,
    Joining,
    Lost,
    Mark,
    OtherTerms,
    PutOut,
    Round,
    Totals,
    printable,
)
from shoal.interrupts import result_of
from shoal.optim.epoch import Epoch
from shoal.optim.pilot import Pilot
from shoal.optim.reports import DownloadReport, EpochReport, Event, ForkReport
from shoal.optim.terms import this_machine
from shoal.p2p.errors import P2PError
from shoal.p2p.release import RELEASE
from shoal.swarm.protocol.messages import Terms

log = logging.getLogger(__name__)

RECENT_EPOCHS = 8  # the record has the mean time of so many epochs
AT_ONCE_SECONDS = 2.0  # the shortest time between two records; news make this peer publish early
GOODBYE_SECONDS = 0.5  # nobody waits longer than this for the last record
NOT_COMPARED = bytes(PREFIX_BYTES)  # replaces a digest that may differ between healthy peers


class Vitals:
    """Gathers the contents of this peer's health record, and publishes a record every PERIOD_SECONDS.

    The trainer's thread calls `heard` and `report`. The reactor calls `health` and publishes. A lock guards the fields
    that both use, and is held only for short.

    Args:
        pilot: asks the run, and has its tracker.
        epoch: has the state.
        compares: whether peers with the same kind of machine hold the same parameters at the end of each epoch.
        counts_steps: whether an epoch ends after a number of inner steps, instead of samples.
    """

    def __init__(self, pilot: Pilot, epoch: Epoch, *, compares: bool, counts_steps: bool) -> None:
        self._run, self._tracker, self._epoch, self._compares = pilot.run, pilot.tracker, epoch, compares
        self._named = pilot.machine
        self._counts_steps = counts_steps
        self._lock = threading.Lock()
        self._started, self._number = get_dht_time(), 0
        self._release = printable(RELEASE, MAX_TEXT)
        self._device = printable(this_machine().partition(", ")[2], MAX_TEXT)
        self._terms = _hash_of(pilot.run.swarm.peer.terms)
        self._machine = b""
        self._marks: dict[int, Mark] = {}  # by the number that divides the epoch
        self._ends: deque[float] = deque(maxlen=RECENT_EPOCHS + 1)  # the times at which epochs ended
        self._last: Round | None = None
        self._totals = Totals()
        self._losses: list[float] = []  # the losses since the last record
        self._loss: float | None = None  # the mean loss of the last record
        self._publishing: asyncio.Task[None] | None = None
        self._warned = False  # whether a warning has told of an unexpected error

    # -- in the trainer's thread

    def report(self, loss: float) -> None:
        """Record a loss of the trainer. A loss that is not finite counts as a fault."""
        if not math.isfinite(loss):
            self._run.faults.add(FaultKind.NOT_FINITE, f"the loss is {loss}")
            return
        with self._lock:
            self._losses.append(loss)
            if len(self._losses) > 65536:  # nobody publishes, or steps take a tenth of a millisecond
                del self._losses[: len(self._losses) // 2]

    def heard(self, event: Event) -> None:
        """Record an event that the optimizer tells its user."""
        try:
            self._gather(event)
        except Exception as error:  # noqa: BLE001 (an error here must not end the training)
            self._failed(error)

    def _gather(self, event: Event) -> None:
        tip, machine = self._epoch.applied, _prefix(self._named.name.encode())
        with self._lock:
            match event:
                case EpochReport():
                    self._ends.append(time.monotonic())
                    self._last = last = _round_of(event)
                    self._totals = _added(self._totals, last)
                    self._mark(event.epoch, tip.lineage, event.state_digest, machine)
                case DownloadReport():
                    self._ends.clear()
                    self._totals = msgspec.structs.replace(self._totals, downloads=self._totals.downloads + 1)
                    self._mark(event.epoch, tip.lineage, event.state_digest, machine)
        if isinstance(event, ForkReport):
            self._run.faults.add(FaultKind.FORK, str(event))

    def _mark(self, epoch: int, lineage: bytes, digest: str, machine: bytes) -> None:
        if machine != self._machine:  # the bits of this peer's steps are no longer comparable with those before
            self._marks.clear()
            self._machine = machine
        told = bytes.fromhex(digest)[:PREFIX_BYTES] if self._compares else NOT_COMPARED
        for every in MARK_EVERY:
            if epoch % every == 0:
                self._marks[every] = Mark(epoch, lineage[:PREFIX_BYTES], told)
            elif every in self._marks and self._marks[every].epoch > epoch:  # the mark is of states that it has left
                del self._marks[every]

    # -- on the reactor

    def health(self, *, left: bool = False) -> Health:
        """This peer's present health record."""
        run, swarm, node = self._run, self._run.swarm, self._run.dht.node
        tip, local, all_peers = self._epoch.applied, self._tracker.local_progress, self._tracker.global_progress
        counts, fault = run.faults.so_far()
        missing = [peer.key[:PREFIX_BYTES] for peer in swarm.contacts.missing()[:MAX_UNREACHED]]
        refused, losses = swarm.contacts.refused(), swarm.contacts.losses
        now, loading = asyncio.get_running_loop().time(), swarm.loading
        lost, out = losses.told(MAX_LOST, now), losses.last_out
        with self._lock:
            totals, marks, ends = self._totals, dict(self._marks), list(self._ends)
            loss = sum(self._losses) / len(self._losses) if self._losses else self._loss
        totals = msgspec.structs.replace(
            totals,
            steps=self._tracker.steps_made,
            samples=self._tracker.samples_made,
            sent=node.bytes_sent,
            received=node.bytes_received,
        )
        return Health(
            started=self._started,
            number=self._number,
            at=get_dht_time(),
            left=left,
            version=self._release,
            torch=printable(torch.__version__, MAX_TEXT),
            device=self._device,
            role=swarm.me.role,
            terms=self._terms,
            machine=self._machine or _prefix(self._named.name.encode()),
            epoch=tip.epoch,
            samples_behind=tip.samples,
            newest=max(tip.epoch, all_peers.epoch),
            marks=tuple({mark.epoch: mark for mark in marks.values()}.values()),
            loss=loss if loss is None or abs(loss) <= 1e30 else None,
            samples=float(local.samples_accumulated) if local.epoch == tip.epoch else 0.0,
            all_samples=float(all_peers.samples_accumulated),
            target=float(all_peers.target_batch_size),
            samples_per_second=local.samples_per_second,
            step_seconds=self._tracker.step_seconds,
            epoch_seconds=(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0,
            last=self._last,
            totals=totals,
            faults=counts,
            fault=fault,
            members=len(swarm.peer.view.connected()),
            unreached=tuple(missing),
            refused=None
            if refused is None
            else OtherTerms(refused[0][:PREFIX_BYTES], printable(refused[1], MAX_REASON)),
            cpu_seconds=time.process_time(),
            memory=_memory(),
            lost=tuple(Lost(loss.key[:PREFIX_BYTES], loss.number, loss.coordinated) for loss in lost),
            put_out=None
            if out is None
            else PutOut(out.key[:PREFIX_BYTES], out.number, printable(out.reason, MAX_REASON)),
            counts_steps=self._counts_steps,
            joining=None if loading is None else Joining(*loading.progress),
            waits=max(0.0, swarm.peer.newcomers.told_until - now),
        )

    async def _publish(self, board: HealthBoard, *, left: bool = False) -> None:
        self._run.swarm.contacts.losses.news.clear()
        try:
            health = self.health(left=left)
            self._number += 1
            with self._lock:
                self._loss, self._losses = health.loss, []
            await board.publish(health, len(self._run.swarm.peer.view.members))
        except (P2PError, TimeoutError) as error:
            log.debug("this peer's health record could not be published: %s", error)
        except Exception as error:  # noqa: BLE001 (the next one may be published)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Log an unexpected error, which is a bug of Shoal: the first one as a warning, later ones at DEBUG."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "this peer's health record may be missing or incomplete: %r", error, exc_info=error)

    async def _keep_publishing(self, board: HealthBoard) -> None:
        """Publish a record every PERIOD_SECONDS, and earlier when there are `Losses.news`."""
        news = self._run.swarm.contacts.losses.news
        while True:
            await self._publish(board)
            soonest = min(AT_ONCE_SECONDS, PERIOD_SECONDS)
            await asyncio.sleep(soonest)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS - soonest):
                    await news.wait()

    # -- life

    def start(self) -> None:
        """Begin to publish."""
        board, node = self._board(), self._run.dht.node
        self._publishing = self._run.call(lambda: node.spawn(self._keep_publishing(board)))

    def stop(self) -> None:
        """Publish a last record, which says that this peer leaves, and stop."""
        if self._publishing is None or not self._run.dht.is_alive():
            return
        with contextlib.suppress(TimeoutError, CancelledError, RuntimeError):  # the DHT is shut down at this moment
            result_of(self._run.dht.submit(self._say_goodbye()), 2 * GOODBYE_SECONDS)

    async def _say_goodbye(self) -> None:
        assert self._publishing is not None
        self._publishing.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._publish(self._board(), left=True)

    def _board(self) -> HealthBoard:
        return HealthBoard(self._run.dht.dht_node, self._run.run_id)


def _prefix(name: bytes) -> bytes:
    return blake3(name).digest(length=PREFIX_BYTES)


def _hash_of(terms: Terms) -> bytes:
    return _prefix(msgspec.msgpack.encode((sorted(terms.options.items()), terms.schema)))


def _round_of(event: EpochReport) -> Round:
    return Round(
        epoch=event.epoch,
        samples=event.samples,
        members=event.num_peers,
        waiting=event.waiting_seconds,
        matchmaking=event.matchmaking_seconds,
        exchange=event.allreduce_seconds,
        step=event.step_seconds,
        sent=event.bytes_sent,
        received=event.bytes_received,
    )


def _added(totals: Totals, last: Round) -> Totals:
    times: dict[str, Any] = {
        name: getattr(totals, name) + getattr(last, name) for name in ("waiting", "matchmaking", "exchange", "step")
    }
    return msgspec.structs.replace(totals, rounds=totals.rounds + 1, **times)


def _memory() -> int:
    """The resident memory of this process in bytes; 0 if the system does not tell (it is not Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
