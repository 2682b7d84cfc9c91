"""How an averager's step goes through rounds: one at a time, tried again, cancelled, in the run of its group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, overload

import torch

from shoal.averaging.control import AveragingStage, Gathered, StepControl
from shoal.averaging.hold import Hold
from shoal.averaging.options import check_bits
from shoal.averaging.report import RoundReport
from shoal.averaging.runs import Runs, next_bits
from shoal.averaging.vector import Vector
from shoal.compression import Compression, CompressionInfo
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import FlatBuffer
from shoal.p2p.identity import PeerID
from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.contribution import Contribution, Outcome, told
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm

log = logging.getLogger(__name__)

T = TypeVar("T")

SHUT_DOWN = "the averager was shut down"
HOLD_SECONDS = 1.0  # that a result waits at least for the tensors
RETRY_SECONDS = 0.05  # after a round that failed: what fails at once is not to keep the reactor busy


class Stepping(ABC):
    """The steps of a `DecentralizedAverager`, on the reactor.

    Args:
        tensors: that are averaged; they move into flat memory.
        dht, prefix: as of `DecentralizedAverager`.
        rules: of its rounds, but for the sizes of what is averaged.
        compression, infos: how the tensors travel, and their names and roles.
        auxiliary, averaging_alpha, group_bits: as of `DecentralizedAverager`.

    Attributes:
        in_step: whether all members make their steps together: then one that misses a round fetches its result, where
            it otherwise would join the next one.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        dht: DHT,
        prefix: str,
        rules: Rules,
        *,
        compression: Compression,
        infos: Sequence[CompressionInfo] | None,
        auxiliary: bool,
        averaging_alpha: float,
        group_bits: str,
    ) -> None:
        self.dht, self.prefix = dht, prefix
        self.auxiliary, self.averaging_alpha = auxiliary, averaging_alpha
        self.last_round: RoundReport | None = None
        self.in_step = False
        self.lock_averaged_tensors = threading.Lock()
        self._tensors = tuple(tensors)
        self._memory = FlatBuffer.adopt(self._tensors)
        self._on_host = all(spec.device.type == "cpu" for spec in self._memory.layout.buffers)
        self._compression = compression
        layout = self._memory.layout.on("cpu")
        self._vector = Vector(layout, compression, infos, self._memory if self._on_host else None)
        self._rules = dataclasses.replace(rules, sizes=self._vector.sizes)
        self._swarm: Swarm | None = None  # of the run, from start to shutdown
        self._runs = Runs(self._make_swarm)
        self._bits = group_bits
        self._tips: dict[str, Tip] = {}  # at which this peer left the runs of group bits
        self._turn = asyncio.Lock()  # one step at a time: they share the memory, and this peer's place in a round
        self._joining: tuple[StepControl, Contribution, Swarm] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def peer_id(self) -> PeerID:
        """This peer, as it is named in the result of `step`."""
        return self.dht.peer_id

    @overload
    def get_group_bits(self, wait: Literal[True] = True) -> str: ...
    @overload
    def get_group_bits(self, wait: Literal[False]) -> Future[str]: ...
    def get_group_bits(self, wait: bool = True) -> str | Future[str]:
        """With whom the next step averages: see `initial_group_bits`. If not `wait`, a future of it."""
        return self._bits if wait else _done(self._bits)

    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[True] = True) -> None: ...
    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[False]) -> Future[None]: ...
    def set_group_bits(self, group_bits: str, wait: bool = True) -> Future[None] | None:
        """Average with others from the next step on. If not `wait`, returns a future, which is done already. Raises
        ValueError for anything but "0"s and "1"s."""
        check_bits(group_bits)
        self._bits = group_bits
        return None if wait else _done(None)

    @abstractmethod
    def _make_swarm(self, run_id: str, directory: Directory, rules: Rules) -> Swarm:
        """This peer's part in the run of that name."""

    @property
    def got_on_at(self) -> float:
        """When the round of the step that is under way was last seen to get on, in seconds of `time.monotonic`."""
        joining = self._joining
        return joining[2].got_on_at if joining is not None else float("-inf")

    async def _step(self, control: StepControl) -> Gathered:
        timeout = control.get_timeout()
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            raise AveragingError(f"no result within {timeout:.3g} s: the step before did not end") from None
        hold = Hold(self.lock_averaged_tensors)
        try:
            outcome = await self._try(control, hold, deadline)
        finally:
            hold.release()
            self._turn.release()
        self.last_round = RoundReport.of(outcome)
        return told(outcome)

    async def _try(self, control: StepControl, hold: Hold, deadline: float) -> Outcome:
        """One round; and another, as long as there is time, if it fails."""
        loop = asyncio.get_running_loop()
        if self.in_step and self._swarm is not None:
            control.tip = self._swarm.catch_up()
        while True:
            control.stage = AveragingStage.LOOKING_FOR_GROUP
            try:
                async with self._run_of_step() as swarm:
                    outcome = await self._aggregate(swarm, control, hold, deadline)
                if swarm is not self._swarm:
                    self._bits = next_bits(self._bits, outcome.begin, self.peer_id.key, self._rules.target_group)
                return outcome
            except (Rejected, Behind):
                raise
            except AveragingError as error:
                if not control.allow_retries or loop.time() >= deadline - 2 * RETRY_SECONDS:
                    raise
                log.debug("%r: %s: trying again", self.peer_id, error)
            await asyncio.sleep(RETRY_SECONDS)

    @contextlib.asynccontextmanager
    async def _run_of_step(self) -> AsyncIterator[Swarm]:
        """The run in which this peer averages: that of its group bits."""
        self._runs.forget()
        swarm, bits = self._swarm, self._bits
        if swarm is None:
            raise AveragingError(SHUT_DOWN)
        if not bits:
            yield swarm
            return
        name = f"{self.prefix}.0b{bits}"
        directory = DHTDirectory(self.dht.dht_node, name)
        async with self._runs.joined(name, directory, self._rules, self._tips.get(bits)) as swarm:
            try:
                yield swarm
            finally:
                self._tips[bits] = swarm.tip
                self.dht.node.spawn(directory.withdraw(swarm.me))

    async def _aggregate(self, swarm: Swarm, control: StepControl, hold: Hold, deadline: float) -> Outcome:
        """A round of the run, and its result in the tensors. What subclasses average otherwise."""
        contribution = self._contribution(self._vector, control, hold, self._read)
        outcome = await self._average(swarm, control, contribution, deadline)
        await self._hold_until(deadline, control, hold)  # a round that was missed has not taken it
        if not self.auxiliary:
            self._write(self._vector.outputs)
        return outcome

    def _contribution(
        self, vector: Vector, control: StepControl, hold: Hold, fill: Callable[[], Awaitable[None]]
    ) -> Contribution:
        """The vector, once the user allows it and lets go of the tensors, as this step's part in a round. Then `fill`
        writes its inputs."""

        async def prepare() -> None:
            await self._wait_for_trigger(control, contribution)
            if await hold.take():
                await fill()

        me = self.peer_id.key
        contribution = Contribution(
            control.weight,
            lambda begin, send, fault: vector.open(me, begin, send, fault),
            max(0.0, control.scheduled_time - get_dht_time()),
            prepare,
            control.data_for_gather,
            excused=lambda: not control.triggered,
            tip=control.tip,
        )
        return contribution

    async def _wait_for_trigger(self, control: StepControl, contribution: Contribution) -> None:
        if not control.triggered:
            control.stage = AveragingStage.AWAITING_TRIGGER
            await control.wait_for_trigger()
        if control.done():
            raise asyncio.CancelledError  # what was cancelled brings nothing, also before the round has heard of it
        control.stage, control.began_allreduce = AveragingStage.RUNNING_ALLREDUCE, True
        contribution.weight = 0.0 if self.auxiliary else control.weight

    async def _average(
        self, swarm: Swarm, control: StepControl, contribution: Contribution, deadline: float
    ) -> Outcome:
        self._joining = (control, contribution, swarm)
        try:
            return await swarm.average(contribution, deadline - asyncio.get_running_loop().time())
        finally:
            self._joining = None

    def _reschedule(self, control: StepControl) -> None:
        """The user has set another time for that step."""
        if self._joining is not None and self._joining[0] is control:
            _, contribution, swarm = self._joining
            contribution.patience = max(0.0, control.scheduled_time - get_dht_time())
            swarm.rejoin()

    async def _hold_until(self, deadline: float, control: StepControl, hold: Hold) -> None:
        """There is a result: have the tensors for writing it, if the step was not cancelled meanwhile."""
        # With `in_step` a round that gets on may last longer than the deadline.
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + HOLD_SECONDS)):
                await hold.take()
        except TimeoutError:
            raise AveragingError("there is a result, but the tensors are in use (`get_tensors`)") from None
        if not control.claim():
            raise asyncio.CancelledError

    async def _read(self) -> None:
        """Bring what is averaged to the host; nothing to do for tensors that are there."""
        if not self._on_host:
            for host, tensor in zip(self._vector.inputs.flat, self._memory.flat, strict=True):
                host.copy_(tensor)

    def _write(self, outputs: FlatBuffer) -> None:
        for tensor, output in zip(self._memory.flat, outputs.flat, strict=True):
            if self.averaging_alpha == 1:
                tensor.copy_(output)
            else:
                tensor.lerp_(output.to(tensor.device), self.averaging_alpha)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the reactor, until this averager is shut down."""

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await coroutine
            except asyncio.CancelledError:
                if self._swarm is None or not self.dht.is_alive():
                    task.add_done_callback(_is_told)
                    raise AveragingError(SHUT_DOWN) from None
                raise  # by whoever holds the future
            finally:
                self._tasks.discard(task)

        return self.dht.reactor.submit(run())

    def _call_soon(self, callback: Callable[[StepControl], None], control: StepControl) -> None:
        if self.dht.is_alive():
            self.dht.reactor.loop.call_soon_threadsafe(callback, control)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _is_told(task: asyncio.Task[Any]) -> None:
    """That the averager was shut down is told by the future that was submitted, unless its holder has cancelled that:
    then nobody asks, and asyncio need not complain of it."""
    if not task.cancelled():
        task.exception()
