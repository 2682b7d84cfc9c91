"""The handle of one averaging step: its stage, and what its user may still change or allow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from enum import Enum
from typing import Any

from shoal.dht.records import get_dht_time
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)

Gathered = dict[PeerID, Any]

MAX_WEIGHT = 1e15


class AveragingStage(Enum):
    """How far a step has come."""

    IDLE = 0  # waits for the step before it
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2  # in a group, and waits for `allow_allreduce`
    RUNNING_ALLREDUCE = 3
    FINISHED = 4  # with a result, with an error, or cancelled


class StepControl(Future[Gathered]):
    """One step of an averager: a future of what its group gathered, and the handle by which it is steered.

    Made by `DecentralizedAverager.step(wait=False)` and `schedule_step`. All methods may be called from any thread.

    Args:
        scheduled_time: when the round shall begin at the latest, in seconds of `get_dht_time()`.
        deadline: when the step fails, in the same.
        allow_retries: whether another round is joined if one fails.
        weight: of this peer's tensors in the mean.
        data_for_gather: what the other members get of this one, as msgpack.

    Attributes:
        deadline, allow_retries, data_for_gather: as given.
        stage: see `AveragingStage`.
        began_allreduce: whether the tensors have been read.
        tip: the run's state from which a round is joined, and whose result is fetched if it was missed; None: whichever
            is next.
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
        self.stage = AveragingStage.IDLE
        self.began_allreduce = False
        self.tip: Tip | None = None
        self._scheduled_time, self._weight = float(scheduled_time), check_weight(weight)
        self._trigger: Future[None] = Future()
        self._trigger.set_running_or_notify_cancel()  # so that who is cancelled while it waits cancels nothing
        self._over: Future[None] = Future()  # likewise
        self._over.set_running_or_notify_cancel()
        self._task: Future[Gathered] | None = None
        self._claimed: bool | None = None
        self._rescheduled: Callable[[], None] = lambda: None

    # -- for the user

    def allow_allreduce(self) -> None:
        """Let the all-reduce begin as soon as there is a group. Calling it again does nothing."""
        with contextlib.suppress(InvalidStateError):
            self._trigger.set_result(None)

    @property
    def triggered(self) -> bool:
        """Whether the all-reduce is allowed."""
        return self._trigger.done()

    @property
    def weight(self) -> float:
        """Of this peer's tensors in the mean; may be set until the all-reduce begins. Raises ValueError for what is no
        finite number of at least 0."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if self.began_allreduce:
            log.warning("the weight was set after the all-reduce had begun: it stays %g", self._weight)
            return
        self._weight = check_weight(weight)

    @property
    def scheduled_time(self) -> float:
        """When the round shall begin at the latest, in seconds of `get_dht_time()`; may be set until it begins. (What
        counts is the time of the member that came first.)"""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        if self.began_allreduce:
            log.warning("the time was set after the all-reduce had begun: that changes nothing")
        elif scheduled_time >= self.deadline:
            log.warning("the time was set to after the deadline: without others that come earlier, the step will fail")
        self._scheduled_time = float(scheduled_time)
        self._rescheduled()

    def get_timeout(self) -> float:
        """Seconds that are left until the deadline, at least 0."""
        return max(0.0, self.deadline - get_dht_time())

    def cancel(self) -> bool:
        """Take no part, if that can still be; returns whether. The other members go on without this one, and its
        tensors stay as they are."""
        cancelled = super().cancel()
        if cancelled:
            self._is_over()
            if self._task is not None:
                self._task.cancel()
        return cancelled

    # -- for the averager

    def attach(self, task: Future[Gathered], rescheduled: Callable[[], None]) -> None:
        """The step is under way: `task` is its work, and `rescheduled` is called when its time changes."""
        self._task, self._rescheduled = task, rescheduled
        if self.cancelled():
            task.cancel()
        task.add_done_callback(self._finish)

    async def wait_for_trigger(self) -> None:
        """Until the all-reduce is allowed, or the step is over."""
        await asyncio.wrap_future(self._trigger)

    async def wait_for_cancel(self) -> None:
        """Until the step is cancelled, or over otherwise."""
        await asyncio.wrap_future(self._over)

    def claim(self) -> bool:
        """From now on it can't be cancelled: its result is about to be written. False if it was."""
        if self._claimed is None:
            self._claimed = self.set_running_or_notify_cancel()
        return self._claimed

    def _is_over(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self._over.set_result(None)

    def _finish(self, task: Future[Gathered]) -> None:
        self.stage = AveragingStage.FINISHED
        self.allow_allreduce()  # nobody is to wait for that any more
        self._is_over()
        if task.cancelled():
            super().cancel()
        if self.claim():
            error = CancelledError() if task.cancelled() else task.exception()
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(task.result())


def check_weight(weight: object) -> float:
    """`weight` as a float. Raises ValueError if tensors can't count so much in a mean."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or not 0 <= weight <= MAX_WEIGHT:  # type: ignore[operator, arg-type]
        raise ValueError(f"weight={weight!r}: give a number that is not negative, at most 1e15")
    return float(weight)  # type: ignore[arg-type]
