"""The public face of a round: tensors that peers average whenever they call `step`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, overload

import torch

from shoal.averaging.contribution import Contribution, Fault, Outcome, SendTo
from shoal.averaging.directory import DHTDirectory
from shoal.averaging.donor import Snapshot, StateDonor
from shoal.averaging.errors import AveragingError, Rejected
from shoal.averaging.exchange import Exchange, compute_serially
from shoal.averaging.gathered import encode_gathered, told
from shoal.averaging.hold import Hold
from shoal.averaging.member import Member, Role
from shoal.averaging.messages import Begin, Terms
from shoal.averaging.options import (
    NOT_BUILT,
    NOT_BUILT_IN_STEP,
    check_group,
    check_role,
    check_tensors,
    check_weight,
    refuse_not_built,
    term_of,
)
from shoal.averaging.report import RoundReport
from shoal.averaging.rules import Rules
from shoal.averaging.shared_state import snapshot_of, state_of
from shoal.averaging.swarm import Swarm
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import download_state
from shoal.compression import Compression, NoCompression
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import FlatBuffer
from shoal.p2p.identity import PeerID

T = TypeVar("T")
Gathered = dict[PeerID, Any]

DEFAULT_TIMEOUT = 60.0  # of a step, in seconds beyond `min_matchmaking_time`
SHUT_DOWN = "the averager was shut down"
RETRY_SECONDS = 0.05  # after a round that failed: what fails at once is not to keep the reactor busy


class DecentralizedAverager:
    """Averages tensors with whichever peers call `step` at about the same time. All methods are synchronous.

    The given tensors move into flat memory (`tensor.data` becomes a view of it), where rounds read and write them.

    >>> averager = shoal.DecentralizedAverager(tensors, dht, prefix="experiment", start=True)
    >>> gathered = averager.step(weight=32.0, gather={"loss": 0.5})
    >>> with averager.get_tensors() as averaged:
    ...     ...

    Args:
        averaged_tensors: floating point tensors of any shapes; the same shapes and dtypes, in the same order, on all
            peers.
        dht: this peer's place in the DHT, started.
        start: be reachable right away; else call `run_in_background`.
        prefix: names the run: averagers of one prefix meet.
        target_group_size: begin a round as soon as so many have joined, and never with more; None: whoever is there.
        min_group_size: never begin with fewer.
        min_matchmaking_time: at most so many seconds are waited for members that are known and have not joined. (The
            reference waits at least so long; here a round begins as soon as all have joined.)
        allreduce_timeout: seconds from the beginning of a round to its result; 60 when None.
        next_chunk_timeout: seconds of silence after which a member that holds up a round is left out; 5 when None.
        compression: how chunks travel; must be equal on all peers.
        state_compression: how `load_state_from_peers` sends tensors.
        client_mode: never listen and reduce nothing, but get the exact average; None: as the DHT.
        auxiliary: only reduce: lend bandwidth, contribute and receive nothing.
        bandwidth: how much this peer can carry, in any unit that all peers share; its part of the reducing is in
            proportion.
        allow_state_sharing: answer `load_state_from_peers` of others.
        shutdown_timeout: seconds that `shutdown` waits for the round that is under way to end.
        initial_group_bits, request_timeout, averaging_alpha, part_size_bytes, sender_timeout, reducer_timeout,
            tensor_infos, min_vector_size, declare_state_period, daemon: of the reference; not built yet.

    Raises NotImplementedError that names an argument that is not built yet, and ValueError if a tensor is not of
    floating point, shares memory with another, or if the options contradict.
    """

    def __init__(
        self,
        averaged_tensors: Sequence[torch.Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        min_matchmaking_time: float = 5.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        compression: Compression | None = None,
        state_compression: Compression | None = None,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        bandwidth: float | None = None,
        allow_state_sharing: bool | None = None,
        shutdown_timeout: float = 5.0,
        initial_group_bits: str = "",
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 2**19,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        tensor_infos: Any = None,
        min_vector_size: int = 0,
        declare_state_period: float = 30,
        daemon: bool = True,
    ) -> None:
        refuse_not_built(locals(), NOT_BUILT)
        client_mode = dht.client_mode if client_mode is None else client_mode
        check_role(client_mode, auxiliary, bandwidth)
        check_group(target_group_size, min_group_size)
        check_tensors(averaged_tensors)
        self.dht = dht
        self.prefix = prefix
        self.client_mode = client_mode
        self.auxiliary = auxiliary
        self.bandwidth = bandwidth
        self._shares_state = not client_mode and not auxiliary if allow_state_sharing is None else allow_state_sharing
        self.min_matchmaking_time = min_matchmaking_time
        self.shutdown_timeout = shutdown_timeout
        self.last_round: RoundReport | None = None
        self.lock_averaged_tensors = threading.Lock()
        self._compression = compression if compression is not None else NoCompression()
        self._state_compression = state_compression if state_compression is not None else NoCompression()
        self._tensors = tuple(averaged_tensors)
        self._memory = FlatBuffer.adopt(self._tensors)
        self._layout = self._memory.layout.on("cpu")
        self._output = FlatBuffer(self._layout)
        self._codecs = self._compression.plan(self._layout)
        self._rules = Rules(
            sizes=tuple(spec.numel for spec in self._layout.buffers),
            matchmaking_time=min_matchmaking_time,
            round_timeout=60.0 if allreduce_timeout is None else allreduce_timeout,
            min_group=min_group_size,
            target_group=target_group_size,
        )
        self._chunk_timeout = next_chunk_timeout
        self._swarm: Swarm | None = None
        self._donor: StateDonor | None = None
        self._turn = asyncio.Lock()  # one step at a time: they share the memory, and this peer's place in a round
        self._tasks: set[asyncio.Task[Any]] = set()
        self._snapshots = itertools.count()
        if start:
            self.run_in_background()

    # -- life

    def run_in_background(self) -> None:
        """Be reachable: be listed in the DHT, and meet the members that are there."""
        if self._swarm is None:
            self.dht.reactor.run(self._start())

    async def _start(self) -> None:
        compute_serially()
        node, dht = self.dht.node, self.dht.dht_node
        role = Role.CLIENT if self.client_mode else Role.AUXILIARY if self.auxiliary else Role.NODE
        addresses = () if self.client_mode else tuple(str(address) for address in dht.visible_addresses())[:8]
        me = Member(node.peer_id.key, addresses, role, 1.0 if self.bandwidth is None else self.bandwidth)
        options = {"compression": term_of(self._compression.spec), "target_group_size": str(self._rules.target_group)}
        terms = Terms(options, self._layout.schema_hash)
        swarm = Swarm(
            node, DHTDirectory(dht, self.prefix), self.prefix, me, terms, self._rules, chunk_timeout=self._chunk_timeout
        )
        self._donor = StateDonor(
            node,
            f"state/{self.prefix}",
            self._take_snapshot,
            # What is shared may change at any time, so no snapshot that was taken before is offered again.
            lambda: Tip.genesis(f"{self.prefix} {next(self._snapshots)}"),
            allow=self._shares_state,
        )
        await swarm.start()
        self._swarm = swarm

    def is_alive(self) -> bool:
        """Whether this averager is reachable."""
        return self._swarm is not None

    def shutdown(self) -> None:
        """Leave the run; a step that is under way fails. The DHT stays. Calling it again does nothing."""
        swarm, self._swarm = self._swarm, None
        if swarm is None or not self.dht.is_alive():
            return

        async def stop() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            swarm.stop()
            if self._donor is not None:
                self._donor.close()

        self.dht.reactor.submit(stop()).result(self.shutdown_timeout)

    def __enter__(self) -> DecentralizedAverager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def peer_id(self) -> PeerID:
        """This peer, as it is named in the result of `step`."""
        return self.dht.peer_id

    @property
    def allow_state_sharing(self) -> bool:
        """Whether this averager answers `load_state_from_peers` of others; may be changed at any time."""
        return self._shares_state

    @allow_state_sharing.setter
    def allow_state_sharing(self, value: bool) -> None:
        self._shares_state = value
        if self._donor is not None:
            self._donor.allow = value

    # -- averaging

    @contextlib.contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """The averaged tensors, to be read and changed in place. No round reads or writes them while this lasts."""
        with self.lock_averaged_tensors:
            yield self._tensors

    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: Literal[True] = True,
    ) -> Gathered: ...
    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        *,
        wait: Literal[False],
    ) -> Future[Gathered]: ...
    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> Gathered | Future[Gathered]: ...
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> Gathered | Future[Gathered]:
        """Take part in one round: on return the tensors hold the weighted mean, the same bits on all members.

        Args:
            gather: plain data (numbers, strings, bytes, lists, dictionaries) that every member gets; at most 64 KiB.
            scheduled_time: when the round shall begin at the latest, in seconds of `get_dht_time()`; by default in
                `min_matchmaking_time` seconds.
            weight: of this peer's tensors in the mean, at least 0; 1 by default, 0 for an auxiliary.
            timeout: seconds until this fails; by default 60 beyond `min_matchmaking_time`.
            allow_retries: join another round if one fails, as long as `timeout` allows.
            require_trigger: of the reference; not built yet.
            wait: return the result; if False, a future of it.

        Steps of one averager are taken one after another, in the order in which they were called.

        Returns: what all members gathered, by peer id; None of a member that gathered nothing, or nothing that can be
            read, and of all if this peer missed the round and only got its result.
        Raises AveragingError if there is no result in time or the averager is shut down, ValueError for arguments that
            make no sense, NotImplementedError for such as are not built yet.
        """
        refuse_not_built(locals(), NOT_BUILT_IN_STEP)
        if self._swarm is None:
            raise RuntimeError("this averager was not started, or was shut down")
        if weight is None:
            weight = 0.0 if self.auxiliary else 1.0
        check_weight(weight, self.auxiliary)
        now = get_dht_time()
        patience = self.min_matchmaking_time if scheduled_time is None else max(0.0, scheduled_time - now)
        timeout = patience + DEFAULT_TIMEOUT if timeout is None else timeout
        if scheduled_time is not None and patience > timeout:
            raise ValueError(f"scheduled_time is in {patience:.1f} s, which does not fit within timeout={timeout}")
        data = encode_gathered(gather)
        future = self._submit(self._step(float(weight), data, patience, timeout, allow_retries))
        return future.result() if wait else future

    async def _step(self, weight: float, data: bytes, patience: float, timeout: float, retries: bool) -> Gathered:
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            raise AveragingError(f"no result within {timeout:.3g} s: the step before did not end") from None
        hold = Hold(self.lock_averaged_tensors)
        try:
            outcome = await self._average(self._contribution(weight, data, patience, hold), deadline, retries)
            gathered = told(outcome)
            if not self.auxiliary:
                await self._hold_until(deadline, hold)  # a round that was missed has not taken it
                for tensor, output in zip(self._memory.flat, self._output.flat, strict=True):
                    tensor.copy_(output)
        finally:
            hold.release()
            self._turn.release()
        self.last_round = RoundReport.of(outcome)
        return gathered

    def _contribution(self, weight: float, data: bytes, patience: float, hold: Hold) -> Contribution:
        on_host = all(spec.device.type == "cpu" for spec in self._memory.layout.buffers)
        inputs = self._memory.flat if on_host else FlatBuffer(self._layout).flat

        async def prepare() -> None:
            if await hold.take() and not on_host:
                for host, tensor in zip(inputs, self._memory.flat, strict=True):
                    host.copy_(tensor)

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            return Exchange.of(self.peer_id.key, begin, inputs, self._output.flat, self._codecs, send, fault)

        return Contribution(weight, open_exchange, patience, prepare, data)

    async def _hold_until(self, deadline: float, hold: Hold) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await hold.take()
        except TimeoutError:
            raise AveragingError("there is a result, but the tensors are in use (`get_tensors`)") from None

    async def _average(self, contribution: Contribution, deadline: float, retries: bool) -> Outcome:
        """One round; and another, as long as there is time, if it fails."""
        loop = asyncio.get_running_loop()
        while True:
            swarm = self._swarm
            if swarm is None:
                raise AveragingError(SHUT_DOWN)
            try:
                return await swarm.average(contribution, deadline - loop.time())
            except Rejected:
                raise
            except AveragingError:
                if not retries or loop.time() >= deadline - 2 * RETRY_SECONDS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    # -- state

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """What `load_state_from_peers` gives to others: (plain data, tensors). Meant to be overridden."""
        with self.get_tensors() as tensors:
            return {}, [tensor.detach().clone() for tensor in tensors]

    @overload
    def load_state_from_peers(
        self, wait: Literal[True] = True, timeout: float | None = None
    ) -> tuple[Any, list[torch.Tensor]] | None: ...
    @overload
    def load_state_from_peers(
        self, wait: Literal[False], timeout: float | None = None
    ) -> Future[tuple[Any, list[torch.Tensor]] | None]: ...
    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None
    ) -> tuple[Any, list[torch.Tensor]] | Future[tuple[Any, list[torch.Tensor]] | None] | None:
        """Download the state that the majority of the peers has; see `get_current_state`.

        Returns (plain data, tensors), or None if no peer shares a state. Nothing of this averager changes.
        Raises AveragingError if peers share one but none could bring it within `timeout` seconds (60 when None).
        """
        future = self._submit(self._load_state(60.0 if timeout is None else timeout))
        return future.result() if wait else future

    async def _load_state(self, timeout: float) -> tuple[Any, list[torch.Tensor]] | None:
        swarm = self._swarm
        if swarm is None:
            raise AveragingError("this averager was not started, or was shut down")
        donors = [m.peer for m in swarm.neighbourhood.connected() if m.role is Role.NODE and m.peer != self.peer_id]
        if not donors:
            return None
        state = await download_state(
            self.dht.node, f"state/{self.prefix}", donors, timeout=timeout, rng=random.Random(self.peer_id.key)
        )
        try:
            return state_of(state)
        except ValueError as error:
            raise AveragingError(f"the state that was downloaded can't be read: {error}") from error

    async def _take_snapshot(self) -> Snapshot:
        assert self._swarm is not None
        data, tensors = await asyncio.get_running_loop().run_in_executor(None, self.get_current_state)
        return snapshot_of(self._swarm.tip, data, tensors, self._state_compression)

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
                    raise AveragingError(SHUT_DOWN) from None
                raise  # by whoever holds the future
            finally:
                self._tasks.discard(task)

        return self.dht.reactor.submit(run())
