"""The public face of a round: tensors that peers average whenever they call `step`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import msgspec
import torch

from shoal.averaging.contribution import Contribution, Fault, Outcome, SendTo
from shoal.averaging.coordinator import Rules
from shoal.averaging.directory import DHTDirectory
from shoal.averaging.donor import Snapshot, StateDonor
from shoal.averaging.errors import AveragingError, Rejected
from shoal.averaging.exchange import Exchange, compute_serially
from shoal.averaging.member import Member, Role
from shoal.averaging.messages import MAX_GATHER_BYTES, Begin, Terms
from shoal.averaging.swarm import Swarm
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import download_state
from shoal.compression import Codec, NoCompression
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import FlatBuffer, Layout
from shoal.p2p.identity import PeerID

T = TypeVar("T")
Gathered = dict[PeerID, Any]

DEFAULT_TIMEOUT = 60.0  # of a step, in seconds beyond `min_matchmaking_time`


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a committed round went, on this peer. Times in seconds, sizes in bytes of payload.

    Attributes:
        members: who was in it.
        coordinator: who called it.
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
        return cls(
            members=tuple(member.peer for member in outcome.begin.members),
            coordinator=outcome.coordinator,
            matchmaking_seconds=outcome.matchmaking_seconds,
            allreduce_seconds=outcome.allreduce_seconds,
            join_to_begin_seconds=outcome.join_to_begin_seconds,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            digest=outcome.commit.root.hex(),
        )


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
        shutdown_timeout: seconds that `shutdown` waits for the round that is under way.

    Raises ValueError if a tensor is not of floating point, shares memory with another, or if the options contradict.
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
        compression: Codec | None = None,
        state_compression: Codec | None = None,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        bandwidth: float | None = None,
        allow_state_sharing: bool | None = None,
        shutdown_timeout: float = 5.0,
    ) -> None:
        client_mode = dht.client_mode if client_mode is None else client_mode
        if client_mode and auxiliary:
            raise ValueError(
                "an auxiliary averager lends its bandwidth, a client has none to lend: choose one of the two"
            )
        if target_group_size is not None and target_group_size < min_group_size:
            raise ValueError(f"target_group_size={target_group_size} is less than min_group_size={min_group_size}")
        if bandwidth is not None and not 0 <= bandwidth < math.inf:
            raise ValueError(f"bandwidth={bandwidth}: give a number that is not negative")
        for index, tensor in enumerate(averaged_tensors):
            if not tensor.is_floating_point():
                raise ValueError(f"averaged_tensors[{index}] is of {tensor.dtype}: only floating point can be averaged")
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
        self._codec = compression if compression is not None else NoCompression()
        self._state_codec = state_compression if state_compression is not None else NoCompression()
        self._tensors = tuple(averaged_tensors)
        self._memory = FlatBuffer.adopt(self._tensors)
        self._layout = self._memory.layout.on("cpu")
        self._output = FlatBuffer(self._layout)
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
        self._steps: set[Future[Any]] = set()
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
        options = {"compression": self._codec.spec, "target_group_size": str(self._rules.target_group)}
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
            self._state_codec,
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
        for future in list(self._steps):
            future.cancel()

        async def stop() -> None:
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
        *,
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
        *,
        wait: Literal[False],
    ) -> Future[Gathered]: ...
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        *,
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
            wait: return the result; if False, a future of it.

        Returns: what all members gathered, by peer id.
        Raises AveragingError if there is no result in time, ValueError for arguments that make no sense.
        """
        if self._swarm is None:
            raise RuntimeError("this averager was not started, or was shut down")
        if weight is None:
            weight = 0.0 if self.auxiliary else 1.0
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"weight={weight!r}: give a number that is not negative")
        if self.auxiliary and weight:
            raise ValueError(f"weight={weight!r}: an auxiliary averager contributes nothing")
        now = get_dht_time()
        patience = self.min_matchmaking_time if scheduled_time is None else max(0.0, scheduled_time - now)
        timeout = patience + DEFAULT_TIMEOUT if timeout is None else timeout
        if scheduled_time is not None and patience > timeout:
            raise ValueError(f"scheduled_time is in {patience:.1f} s, which does not fit within timeout={timeout}")
        try:
            gathered = msgspec.msgpack.encode(gather)
        except TypeError as error:
            raise ValueError(f"gather must be plain data that msgpack can write: {error}") from error
        if len(gathered) > MAX_GATHER_BYTES:
            raise ValueError(f"gather takes {len(gathered)} bytes; at most {MAX_GATHER_BYTES} are allowed")
        future = self._submit(self._step(float(weight), gathered, patience, timeout, allow_retries))
        return future.result() if wait else future

    async def _step(self, weight: float, gathered: bytes, patience: float, timeout: float, retries: bool) -> Gathered:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        locked = False

        async def lock() -> None:
            nonlocal locked
            if not locked:
                await loop.run_in_executor(None, self.lock_averaged_tensors.acquire)
                locked = True
                for host, tensor in zip(inputs, self._memory.flat, strict=True):
                    if host is not tensor:
                        host.copy_(tensor)

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            return Exchange.of(self.peer_id.key, begin, inputs, self._output.flat, self._codec, send, fault)

        on_host = all(spec.device.type == "cpu" for spec in self._memory.layout.buffers)
        inputs = self._memory.flat if on_host else FlatBuffer(self._layout).flat
        contribution = Contribution(
            weight=weight,
            open=open_exchange,
            patience=patience,
            prepare=lock,
            gathered=gathered,
        )
        try:
            while True:
                swarm = self._swarm
                if swarm is None:
                    raise AveragingError("the averager was shut down")
                try:
                    outcome = await swarm.average(contribution, deadline - loop.time())
                    break
                except Rejected:
                    raise
                except AveragingError:
                    if not retries or loop.time() >= deadline - 0.1:
                        raise
            if not self.auxiliary:
                for tensor, output in zip(self._memory.flat, self._output.flat, strict=True):
                    tensor.copy_(output)
        finally:
            if locked:
                self.lock_averaged_tensors.release()
        self.last_round = RoundReport.of(outcome)
        return {
            PeerID(key): msgspec.msgpack.decode(value) if value else None for key, value in outcome.gathered.items()
        }

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
        layout = Layout.from_wire(msgspec.msgpack.decode(state.manifest.layout))
        return msgspec.msgpack.decode(state.scalars), views(layout, state.buffers)

    async def _take_snapshot(self) -> Snapshot:
        assert self._swarm is not None
        metadata, tensors = await asyncio.get_running_loop().run_in_executor(None, self.get_current_state)
        memory = FlatBuffer(Layout.of(tensors).on("cpu"))
        memory.copy_from(tensors)
        layout = msgspec.msgpack.encode(memory.layout.to_wire())
        return Snapshot(self._swarm.tip, layout, memory.flat, msgspec.msgpack.encode(metadata))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        future = self.dht.reactor.submit(coroutine)
        self._steps.add(future)
        future.add_done_callback(self._steps.discard)
        return future


def views(layout: Layout, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of `layout` in downloaded flat buffers."""
    return [buffers[entry.buffer][entry.span.slice].view(entry.shape) for entry in layout.entries]
