"""The engine of an averager: it takes steps through rounds of a run. Its coroutines run on the reactor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from shoal.averaging.control import AveragingStage, Gathered, Hold, RoundReport, StepControl
from shoal.averaging.exchange import Exchange, Vector
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import compute_serially
from shoal.interrupts import finished, result_of, unbroken
from shoal.swarm.protocol.contribution import Contribution, Outcome, told
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm

log = logging.getLogger(__name__)

T = TypeVar("T")

HOLD_SECONDS = 1.0  # a result waits at least this long for the lock of the tensors
RETRY_SECONDS = 0.05  # pause after a failed round, so that rounds that fail at once do not keep the reactor busy
NOT_STARTED = "this averager was not started, or was shut down"
SHUT_DOWN = "the averager was shut down"


Fill = Callable[[], Awaitable[None]]
"""Writes the inputs of a vector."""


class Attempt:
    """A step of an averager: its control, the lock of the tensors, and the round that the step is in.

    Args:
        control: the control of the step.
        lock: the lock of the averaged tensors.
        deadline: when the step fails, on the loop's clock.

    Attributes:
        control, deadline: as given.
        hold: takes the lock.
        joined: what the step brings to a round, and this peer's part in the run of that round; None between rounds.
    """

    def __init__(self, control: StepControl, lock: Lock, deadline: float) -> None:
        self.control, self.deadline, self.hold = control, deadline, Hold(lock)
        self.joined: tuple[Contribution, Swarm] | None = None

    async def average(
        self, swarm: Swarm, vector: Vector, fill: Fill | None = None, state: bytes = b"", patience: float | None = None
    ) -> Outcome:
        """Join a round of that run with the vector.

        Args:
            fill: runs after the user has allowed the all-reduce, and only while this step has the lock of the tensors.
                None: the inputs of the vector are there.
            state: the digest of the local state.
            patience: how many seconds a later round of the step waits for others. Such a round has no tip. None: this
                is the first round of the step.
        """
        control, me = self.control, swarm.me

        async def prepare() -> None:
            if not control.triggered:
                control.enter(AveragingStage.AWAITING_TRIGGER)
                await control.wait_for_trigger()
            if control.done():
                raise asyncio.CancelledError  # a cancelled step brings nothing, even before the round has heard of it
            control.enter(AveragingStage.RUNNING_ALLREDUCE)
            given.weight = control.weight if me.contributes else 0.0
            if await self.hold.take() and fill is not None:
                await fill()

        def waits_for_user() -> bool:
            return not control.triggered

        opens, gathered = partial(Exchange, [vector], me.key), control.data_for_gather
        wait, tip = (self._patience(), control.tip) if patience is None else (patience, None)
        given = Contribution(control.weight, opens, wait, prepare, gathered, waits_for_user, tip, state=state)
        self.joined = (given, swarm)
        try:
            return await swarm.average(given, self.deadline - asyncio.get_running_loop().time())
        finally:
            self.joined = None

    def _patience(self) -> float:
        return max(0.0, self.control.scheduled_time - get_dht_time())

    def reschedule(self) -> None:
        """The user has set another scheduled time."""
        if self.joined is not None:
            given, swarm = self.joined
            given.patience = self._patience()
            swarm.rejoin()

    async def take_tensors(self) -> None:
        """Take the lock of the tensors, to write the result of a round, unless the step was cancelled meanwhile."""
        # If members make their steps together, a round that makes progress may last longer than the deadline.
        try:
            async with asyncio.timeout_at(max(self.deadline, asyncio.get_running_loop().time() + HOLD_SECONDS)):
                await self.hold.take()  # a peer that missed the round does not hold the tensors yet
        except TimeoutError:
            raise AveragingError("there is a result, but the tensors are in use (`get_tensors`)") from None
        if not self.control.claim():
            raise asyncio.CancelledError


Procedure = Callable[[Swarm, Attempt], Awaitable[Outcome]]
"""How a step averages: it joins one or more rounds, of the given run or of others, and writes their result."""

Enter = Callable[[contextlib.ExitStack], Swarm]
"""Makes this peer's part in a run. The stack is closed when the peer has left the run."""

Final = tuple[type[AveragingError], ...]
"""Errors after which another try would fail for the same reason."""

FINAL: Final = (Rejected, Behind)


class Engine:
    """Is in a run, and makes the steps of an averager there. A step waits until the step before it has ended. If the
    procedure of a step fails, the engine tries it again as long as there is time.

    Args:
        dht: this peer's `DHT`.
        enter: called when the engine is about to join the run.
        procedure: how a step averages.
        lock: the lock of the averaged tensors.
        final: the errors that end a step.

    Attributes:
        swarm: this peer's part in the run, from the end of the start to the shutdown; else None.
        last_round: a `RoundReport` of the last step that succeeded, or None.
    """

    def __init__(self, dht: DHT, enter: Enter, procedure: Procedure, lock: Lock, final: Final = FINAL) -> None:
        self._dht, self._enter, self._procedure, self._lock, self._final = dht, enter, procedure, lock, final
        self.swarm: Swarm | None = None
        self.last_round: RoundReport | None = None
        self._starting: Future[None] | None = None  # from start to shutdown
        self._beside = contextlib.ExitStack()  # what is there as long as this peer is in the run
        self._turn = asyncio.Lock()  # one step at a time: steps share the memory, and this peer's place in a round
        self._attempt: Attempt | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def is_alive(self) -> bool:
        """Whether this peer is in the run."""
        return self._starting is not None and self.swarm is not None

    @property
    def got_on_at(self) -> float:
        """See `DecentralizedAverager`."""
        attempt = self._attempt
        return attempt.joined[1].got_on_at if attempt is not None and attempt.joined is not None else float("-inf")

    # -- life

    def start(self, tip: Tip | None = None) -> None:
        """Begin to join the run. Calling this again does nothing.

        Args:
            tip: the tip at which this peer starts in the run; None: the tip at which every run starts.
        """
        if self._starting is None:
            self._starting = self._dht.reactor.submit(self._start(tip))

    async def _start(self, tip: Tip | None) -> None:
        self._begin_task()
        compute_serially()
        with contextlib.ExitStack() as beside:
            swarm = self._enter(beside)
            await swarm.start(tip=tip)
            self.swarm, self._beside = swarm, beside.pop_all()

    def _begin_task(self) -> asyncio.Task[Any]:
        """The present task, of whose end `shutdown` waits."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """See `DecentralizedAverager`."""
        if (starting := self._starting) is None:
            raise RuntimeError(NOT_STARTED)
        if not finished(starting, timeout):
            raise TimeoutError(f"the averager has not joined the run within {timeout:g} s")
        try:
            starting.result()
        except CancelledError:
            raise RuntimeError(NOT_STARTED) from None
        except BaseException:  # whatever ended the start
            if self._starting is starting:
                self._starting = None
            raise

    def shutdown(self, timeout: float) -> None:
        """See `DecentralizedAverager`."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()  # without effect on a start that is done
        if not self._dht.is_alive():
            self.swarm = None
            return

        async def stop() -> None:
            swarm, self.swarm = self.swarm, None
            for task in self._tasks if swarm is not None else ():  # a start is cancelled
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if swarm is not None:
                swarm.stop()
                self._beside.close()

        with unbroken():
            result_of(self._dht.reactor.submit(stop()), timeout)

    # -- steps

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the reactor. `shutdown` cancels it."""

        async def run() -> T:
            task = self._begin_task()
            try:
                return await coroutine
            except asyncio.CancelledError:
                if self.swarm is None or not self._dht.is_alive():
                    # If the user has cancelled the future, nobody retrieves this error, and asyncio would complain.
                    task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
                    raise AveragingError(SHUT_DOWN) from None
                raise  # the user has cancelled the future

        return self._dht.reactor.submit(run())

    def step(self, control: StepControl, tip: Callable[[Swarm], Tip] | None) -> None:
        """Begin a step.

        Args:
            control: the control of the step.
            tip: moves this peer to the tip from which the step joins a round, and returns this tip. None: the step
                joins the next round, from any tip.
        """
        reactor = self._dht.reactor
        attempt = Attempt(control, self._lock, reactor.loop.time() + control.get_timeout())

        def reschedule() -> None:  # in any thread
            if self._dht.is_alive():
                reactor.loop.call_soon_threadsafe(attempt.reschedule)

        control.attach(self.submit(self._step(attempt, tip)), reschedule)

    async def _step(self, attempt: Attempt, tip: Callable[[Swarm], Tip] | None) -> Gathered:
        timeout = attempt.control.get_timeout()
        try:
            async with asyncio.timeout_at(attempt.deadline):
                await self._turn.acquire()
        except TimeoutError:
            raise AveragingError(f"no result within {timeout:.3g} s: the step before did not end") from None
        self._attempt = attempt
        try:
            if tip is not None and self.swarm is not None:
                attempt.control.join_from(tip(self.swarm))
            outcome = await self._try(attempt)
        finally:
            attempt.hold.release()
            self._attempt = None
            self._turn.release()
        self.last_round = RoundReport.of(outcome)
        return told(outcome)

    async def _try(self, attempt: Attempt) -> Outcome:
        """Average; if it fails, try again as long as there is time."""
        control, loop = attempt.control, asyncio.get_running_loop()
        while True:
            control.enter(AveragingStage.LOOKING_FOR_GROUP)
            try:
                if self.swarm is None:
                    raise AveragingError(SHUT_DOWN)
                return await self._procedure(self.swarm, attempt)
            except AveragingError as error:
                final = isinstance(error, self._final) or not control.allow_retries
                if final or loop.time() >= attempt.deadline - 2 * RETRY_SECONDS:
                    raise
                log.debug("%r: %s: trying again", self._dht.peer_id, error)
            await asyncio.sleep(RETRY_SECONDS)
