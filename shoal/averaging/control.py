"""The objects by which a user controls a step of an averager and reads the report of its round."""

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
DEFAULT_TIMEOUT = 60.0  # of a step, in seconds after its scheduled time


class AveragingStage(Enum):
    """The progress of a step.

    Attributes:
        IDLE: waits until the step before it has ended.
        LOOKING_FOR_GROUP: waits until a round begins.
        AWAITING_TRIGGER: is in a round, and waits for `StepControl.allow_allreduce`.
        RUNNING_ALLREDUCE: averages.
        FINISHED: has a result or an error, or was cancelled.
    """

    IDLE = 0
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2
    RUNNING_ALLREDUCE = 3
    FINISHED = 4


class StepControl(Future[Gathered]):
    """One step of an averager: a future of the result of `DecentralizedAverager.step`, and the means to control it.

    `DecentralizedAverager.step(wait=False)` and `schedule_step` make it. All methods may be called from any thread.

    Args:
        scheduled_time: the latest time at which the round begins, in seconds of `get_dht_time()`.
        deadline: the time at which the step fails, on the same clock.
        allow_retries: whether to join another round when one fails; True by default.
        weight: the weight of this peer's tensors in the mean, from 0 to 1e15; 1 by default.
        data_for_gather: what the other members receive from this one, as msgpack; b"" by default.

    Attributes:
        deadline, allow_retries, data_for_gather: as given.
        stage: see `AveragingStage`.
        began_allreduce: whether the averager has begun to read the tensors.
        tip: the name of the run's state from which the step joins a round. If this peer misses that round, the step
            fetches its result. None: the step joins the next round, from any state.

    Raises:
        ValueError: if `weight` is out of range.
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
        """Let the all-reduce begin as soon as a round has begun. Calling this again does nothing."""
        with contextlib.suppress(InvalidStateError):
            self._trigger.set_result(None)

    @property
    def triggered(self) -> bool:
        """Whether the all-reduce is allowed."""
        return self._trigger.done()

    @property
    def weight(self) -> float:
        """The weight of this peer's tensors in the mean, from 0 to 1e15. It may be set until the all-reduce begins;
        later it stays, with a warning in the log.

        Raises:
            ValueError: if it is set to a value out of range.
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
        begins. (If members give different times, the round follows the member that joined first.)"""
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
        """Cancel the step, unless its result is being written. The other members continue without this peer, and the
        tensors do not change.

        Returns:
            Whether the step is cancelled.
        """
        cancelled = super().cancel()
        if cancelled and self._task is not None:
            self._task.cancel()
        return cancelled

    # -- for the averager

    def attach(self, task: Future[Gathered], rescheduled: Callable[[], None]) -> None:
        """Connect the control with the work of the step, which has begun.

        Args:
            task: does the work of the step.
            rescheduled: called when the scheduled time changes.
        """
        self._task, self._rescheduled = task, rescheduled
        if self.cancelled():
            task.cancel()
        task.add_done_callback(self._finish)

    def enter(self, stage: AveragingStage) -> None:
        """The step is in this stage now."""
        self.stage = stage
        self.began_allreduce |= stage is AveragingStage.RUNNING_ALLREDUCE

    def join_from(self, tip: Tip) -> None:
        """The step joins the round from this state. See `tip`."""
        self.tip = tip

    async def wait_for_trigger(self) -> None:
        """Wait until the all-reduce is allowed, or the step is over."""
        await asyncio.wrap_future(self._trigger)

    async def wait_for_cancel(self) -> None:
        """Wait until the step is cancelled, or over for another reason."""
        over = _signal()
        self.add_done_callback(lambda _: over.set_result(None))
        await asyncio.wrap_future(over)

    def claim(self) -> bool:
        """Prevent a later `cancel`, because the result is about to be written. Returns False if the step is cancelled
        already."""
        if self._claimed is None:
            self._claimed = self.set_running_or_notify_cancel()
        return self._claimed

    def _finish(self, task: Future[Gathered]) -> None:
        self.stage = AveragingStage.FINISHED
        self.allow_allreduce()  # so that nobody waits for it any more
        if task.cancelled():
            super().cancel()
        if self.claim():
            error = CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(task.result())


class Hold:
    """Lets one task take a lock that other threads use. It takes the lock at most once, and gives it back even if the
    task ends before it gets the lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._released = lock, False
        self._taken: Future[None] | None = None

    async def take(self) -> bool:
        """Wait for the lock without blocking the event loop. Returns False if `release` was called before."""
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
    """Report of a committed round, as this peer saw it. Times are in seconds, sizes in bytes of payload.

    BEGIN is the coordinator's message that starts the all-reduce, COMMIT the message that ends it, and JOIN the message
    by which a peer joins.

    Attributes:
        members: the peers of the round.
        coordinator: the peer that began the round.
        matchmaking_seconds: the time from the call of `step` to BEGIN.
        allreduce_seconds: the time from BEGIN to COMMIT.
        join_to_begin_seconds: the time from the last JOIN to BEGIN; None on members that did not coordinate.
        bytes_sent: payload that this peer sent to other members.
        bytes_received: payload that this peer received from other members.
        digest: the digest of the averaged tensors, 64 hex digits; equal on all members.
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
        """The report of the round with that outcome."""
        members = tuple(member.peer for member in outcome.begin.members)
        seconds = outcome.matchmaking_seconds, outcome.allreduce_seconds, outcome.join_to_begin_seconds
        nbytes = outcome.bytes_sent, outcome.bytes_received
        return cls(members, PeerID(outcome.begin.ballot.coordinator), *seconds, *nbytes, outcome.commit.root.hex())


def check_weight(weight: float) -> float:
    """Return `weight` as a float.

    Raises:
        ValueError: if it is not a number from 0 to 1e15.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight={weight!r}: give a number that is not negative, at most 1e15")
    return float(weight)


def _signal() -> Future[None]:
    """A future that is not cancelled when a task that waits for it is."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
