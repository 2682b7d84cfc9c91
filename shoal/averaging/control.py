"""A step of an averager as its user sees it: the control by which it is steered, and the report of its round."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shoal.dht.records import get_dht_time
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)

Gathered = dict[PeerID, Any]

MAX_WEIGHT = 1e15


class AveragingStage(Enum):
    """The progress of a step."""

    IDLE = 0  # waits for the step before it
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2  # in a group, and waits for `allow_allreduce`
    RUNNING_ALLREDUCE = 3
    FINISHED = 4  # with a result, with an error, or cancelled


class StepControl(Future[Gathered]):
    """One step of an averager: a future of what its group gathers, and the means to steer it.

    Made by `DecentralizedAverager.step(wait=False)` and `schedule_step`. All methods may be called from any thread.

    Args:
        scheduled_time: the latest time at which the round begins, in seconds of `get_dht_time()`.
        deadline: the time at which the step fails, on the same clock.
        allow_retries: whether to join another round when one fails.
        weight: of this peer's tensors in the mean.
        data_for_gather: what the other members receive from this one, as msgpack.

    Attributes:
        deadline, allow_retries, data_for_gather: as given.
        stage: see `AveragingStage`.
        began_allreduce: whether the tensors have been read.
        tip: the state of the run from which a round is joined, and whose result is fetched if it was missed; None: the
            next round, whichever it is.
    """

    def __init__(
        self,
        scheduled_time: float,
        deadline: float,
        allow_retries: bool = True,
        weight: float = 1.0,
        data_for_gather: bytes = b"",
    ) -> None:
        super().__init__()
        self.deadline, self.allow_retries, self.data_for_gather = deadline, allow_retries, data_for_gather
        self.stage, self.began_allreduce = AveragingStage.IDLE, False
        self.tip: Tip | None = None
        self._scheduled_time, self._weight = float(scheduled_time), check_weight(weight)
        self._trigger = _signal()
        self._task: Future[Gathered] | None = None
        self._claimed: bool | None = None
        self._rescheduled: Callable[[], None] = lambda: None

    # -- for the user

    def allow_allreduce(self) -> None:
        """Let the all-reduce begin as soon as there is a group. Calling this again does nothing."""
        with contextlib.suppress(InvalidStateError):
            self._trigger.set_result(None)

    @property
    def triggered(self) -> bool:
        """Whether the all-reduce is allowed."""
        return self._trigger.done()

    @property
    def weight(self) -> float:
        """The weight of this peer's tensors in the mean. It may be set until the all-reduce begins.

        Raises:
            ValueError: if it is set to anything but a finite number of at least 0.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if self.began_allreduce:
            log.warning("the weight was set after the all-reduce had begun: it stays %g", self._weight)
            return
        self._weight = check_weight(weight)

    @property
    def scheduled_time(self) -> float:
        """The latest time at which the round begins, in seconds of `get_dht_time()`. It may be set until the round
        begins. (The time of the member that joined first counts.)"""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        if self.began_allreduce:
            log.warning("the time was set after the all-reduce had begun: that changes nothing")
        elif scheduled_time >= self.deadline:
            log.warning("the time was set to after the deadline: unless others join earlier, the step will fail")
        self._scheduled_time = float(scheduled_time)
        self._rescheduled()

    def get_timeout(self) -> float:
        """The seconds that are left until the deadline, at least 0."""
        return max(0.0, self.deadline - get_dht_time())

    def cancel(self) -> bool:
        """Cancel the step, if that is still possible. The other members continue without this one, and its tensors do
        not change.

        Returns:
            Whether the step is cancelled.
        """
        cancelled = super().cancel()
        if cancelled and self._task is not None:
            self._task.cancel()
        return cancelled

    # -- for the averager

    def attach(self, task: Future[Gathered], rescheduled: Callable[[], None]) -> None:
        """The step is under way.

        Args:
            task: does the work of the step.
            rescheduled: called when the scheduled time changes.
        """
        self._task, self._rescheduled = task, rescheduled
        if self.cancelled():
            task.cancel()
        task.add_done_callback(self._finish)

    async def wait_for_trigger(self) -> None:
        """Wait until the all-reduce is allowed, or the step is over."""
        await asyncio.wrap_future(self._trigger)

    async def wait_for_cancel(self) -> None:
        """Wait until the step is cancelled, or over for another reason."""
        over = _signal()
        self.add_done_callback(lambda _: over.set_result(None))
        await asyncio.wrap_future(over)

    def claim(self) -> bool:
        """Prevent the step from being cancelled, because its result is about to be written. Returns False if it is
        cancelled already."""
        if self._claimed is None:
            self._claimed = self.set_running_or_notify_cancel()
        return self._claimed

    def _finish(self, task: Future[Gathered]) -> None:
        self.stage = AveragingStage.FINISHED
        self.allow_allreduce()  # nothing is to wait for that any more
        if task.cancelled():
            super().cancel()
        if self.claim():
            error = CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(task.result())


class Hold:
    """One task's claim to a lock that other threads use. The lock is taken at most once, and is given back even if the
    task ends before it gets the lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._released = lock, False
        self._taken: Future[None] | None = None

    async def take(self) -> bool:
        """Wait for the lock without blocking the event loop. Returns False if `release` was called meanwhile."""
        if self._released:
            return False
        if self._taken is None:
            self._taken = _signal()
            if self._lock.acquire(blocking=False):
                self._taken.set_result(None)
            else:
                threading.Thread(target=self._wait, args=(self._taken,), name="shoal-hold", daemon=True).start()
        if not self._taken.done():  # mostly nobody else has the lock
            await asyncio.wrap_future(self._taken)
        return not self._released

    def _wait(self, taken: Future[None]) -> None:
        self._lock.acquire()
        taken.set_result(None)

    def release(self) -> None:
        """Give the lock back, now or as soon as it is taken."""
        self._released = True
        if self._taken is not None:
            self._taken.add_done_callback(lambda _: self._lock.release())


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a committed round went, on this peer. Times are in seconds, sizes in bytes of payload.

    Attributes:
        members: the peers of the round.
        coordinator: the peer that called it.
        matchmaking_seconds: from the call of `step` to BEGIN.
        allreduce_seconds: from BEGIN to COMMIT.
        join_to_begin_seconds: from the last JOIN to BEGIN; None on members that did not coordinate.
        bytes_sent: to other members.
        bytes_received: from other members.
        digest: of the averaged tensors, 64 hex digits; equal on all members.
    """

    members: tuple[PeerID, ...]
    coordinator: PeerID
    matchmaking_seconds: float
    allreduce_seconds: float
    join_to_begin_seconds: float | None
    bytes_sent: int
    bytes_received: int
    digest: str

    @classmethod
    def of(cls, outcome: Outcome) -> RoundReport:
        """The report of a round with that outcome."""
        members = tuple(member.peer for member in outcome.begin.members)
        seconds = outcome.matchmaking_seconds, outcome.allreduce_seconds, outcome.join_to_begin_seconds
        nbytes = outcome.bytes_sent, outcome.bytes_received
        return cls(members, PeerID(outcome.begin.ballot.coordinator), *seconds, *nbytes, outcome.commit.root.hex())


def check_weight(weight: float) -> float:
    """Return `weight` as a float.

    Raises:
        ValueError: if it is no weight of tensors in a mean.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight={weight!r}: give a number that is not negative, at most 1e15")
    return float(weight)


def _signal() -> Future[None]:
    """A future that stays when a task that waits for it is cancelled."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
