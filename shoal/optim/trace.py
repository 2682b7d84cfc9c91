"""Writes the trace of this replica, which `shoal plot` draws."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from shoal.health.trace import TraceEvent
from shoal.optim.reports import DownloadReport, EpochReport, Event

log = logging.getLogger(__name__)


class Trace:
    """Writes what this replica does and when into a file, which `shoal plot` draws together with those of the others.
    Make it when the optimizer stands:

    >>> optimizer.on_event = trace = shoal.Trace("runs/r0.jsonl")

    Each event is a line of JSON, which is in the file as soon as this peer has ended an epoch or a download: if it is
    killed, at most a part of one line is lost. A replica that is started anew may go on in the same file. If the file
    can't be written later on, the trace has a gap, one WARNING says so, and the training goes on.

    In a cluster, rank 0 hears of the events. The other ranks make no trace.

    Args:
        path: the file; lines are appended to it, and its folder is made.
        replica: the name of this replica. None: the file's name, without its suffix.
        then: a function that is called with each event after it is written, as `on_event` without a trace; or None.

    Raises:
        OSError: if the file can't be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], replica: str | None = None, then: Callable[[Event], None] | None = None
    ) -> None:
        self._path = Path(path).absolute()
        self._replica, self._then = self._path.stem if replica is None else replica, then
        self._losses: list[float] = []  # since the last step
        self._has_failed = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        seconds = _age_of_process()
        self._append(self._line(TraceEvent.START, time.time(), **({} if seconds is None else {"seconds": seconds})))

    def __call__(self, event: Event) -> None:
        """Write an event of the optimizer."""
        now = time.time()
        if isinstance(event, EpochReport):
            self._write(*self._epoch(event, now))
        elif isinstance(event, DownloadReport):
            self._losses = []  # of another state
            self._write(self._line(TraceEvent.DOWNLOADING, now, seconds=event.seconds, epoch=event.epoch))
        if self._then is not None:
            self._then(event)

    def report(self, *, loss: float | torch.Tensor) -> None:
        """Report the loss of a batch. The line of the next step has the mean of those reported since the last one,
        or since a download.

        Args:
            loss: as for `Optimizer.report`. One that is not finite does not count.
        """
        value = float(loss.item() if isinstance(loss, torch.Tensor) else loss)
        if math.isfinite(value):
            self._losses.append(value)

    def lost(self, samples: float, reason: str) -> None:
        """Write that samples which this replica has computed are in no step.

        Args:
            samples: how many.
            reason: why, in a few words. The picture has the sum for each reason.
        """
        self._write(self._line(TraceEvent.LOST, time.time(), samples=samples, reason=reason))

    def end(self) -> None:
        """Write that this replica ends in good order. Call it after `shutdown` or `finish` of the optimizer. Replicas
        that end otherwise are dead in the picture."""
        self._write(self._line(TraceEvent.END, time.time()))

    def _epoch(self, event: EpochReport, now: float) -> list[bytes]:
        """The lines of an epoch that ends now, with the step."""
        committed = now - event.step_seconds
        began = committed - event.allreduce_seconds
        waited = event.waiting_seconds + event.matchmaking_seconds
        step = {"epoch": event.epoch, "samples": event.samples, "peers": event.num_peers, "own": event.own_samples}
        if self._losses:
            step["loss"] = sum(self._losses) / len(self._losses)
            self._losses = []
        return [
            self._line(TraceEvent.WAITING, began, seconds=waited),
            self._line(TraceEvent.ROUND, committed, seconds=event.allreduce_seconds),
            self._line(TraceEvent.STEP, now, **step),
        ]

    def _line(self, event: TraceEvent, at: float, **fields: float | str) -> bytes:
        return msgspec.json.encode({"time": at, "replica": self._replica, "event": event.value, **fields}) + b"\n"

    def _write(self, *lines: bytes) -> None:
        try:
            self._append(*lines)
        except OSError as error:  # a full disk, for example
            if not self._has_failed:
                self._has_failed = True
                log.warning("the trace has a gap: %s", error)

    def _append(self, *lines: bytes) -> None:
        with self._path.open("ab") as file:
            file.writelines(lines)


def _age_of_process() -> float | None:
    """How long ago this process began, in seconds; None if the system does not tell (it is not Linux)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None
