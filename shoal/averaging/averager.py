"""The averager that users hold: it averages tensors with other peers that call `step`.

It has an `Engine`, which makes the steps. The trainer's thread calls the public methods; the coroutines run on the
reactor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, overload

import msgspec
import torch

from shoal.averaging.control import DEFAULT_TIMEOUT, Gathered, RoundReport, StepControl, check_weight
from shoal.averaging.engine import NOT_STARTED, Attempt, Engine, Procedure
from shoal.averaging.exchange import Vector, encoded_bytes
from shoal.averaging.options import described, term_of
from shoal.averaging.runs import Runs, next_bits
from shoal.compression import Compression, CompressionInfo, NoCompression, TensorRole, check_for_state, plan_for
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import MADE_IN_INFERENCE, FlatBuffer, Layout, neutral
from shoal.flat.allocation import memory_for
from shoal.interrupts import check, holding, result_of
from shoal.membership.holder import Source
from shoal.p2p.identity import PeerID
from shoal.swarm.gates import admit_to
from shoal.swarm.protocol.contribution import Outcome, encode_gathered
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import DEFAULT_REQUEST_TIMEOUT, Place, Swarm
from shoal.transfer.donor import Copies, EncodedState, FrozenState, Offer, StateDonor, encoded
from shoal.transfer.transfer import Downloaded, NoMemoryForState, NothingShared, download_state

log = logging.getLogger(__name__)

T = TypeVar("T")
State = tuple[Any, list[torch.Tensor]]

STATE_ROLES = (TensorRole.PARAMETER, TensorRole.OPTIMIZER)


class DecentralizedAverager:
    """Averages tensors with the peers that call `step` at about the same time. All methods are synchronous.

    The averager moves the given tensors into flat memory: `tensor.data` becomes a view of it. Rounds read and write
    the tensors there.

    >>> averager = shoal.DecentralizedAverager(tensors, dht, prefix="experiment", start=True)
    >>> gathered = averager.step(weight=32.0, gather={"loss": 0.5})
    >>> with averager.get_tensors() as averaged:
    ...     ...

    Args:
        averaged_tensors: floating point tensors of any shapes. All peers give the same shapes and dtypes in the same
            order.
        dht: this peer's `DHT`; it runs before the averager starts.
        start: if True, join the run at once; otherwise call `run_in_background`.
        prefix: the name of the run. Averagers with the same prefix average with each other.
        target_group_size: begin a round as soon as this many peers have joined, and never with more. None (default):
            wait for all known peers.
        min_group_size: never begin a round with fewer peers; 2 by default.
        initial_group_bits: at most 64 "0"s and "1"s; "" by default, which means one group of all peers. With bits, a
            step averages only with the peers that have the same bits, and each round changes a peer's bits by its place
            in the group. So if there are M**d peers, and groups have `target_group_size` M, all peers have the global
            average after d rounds. Source: Ryabinin et al. 2021, Moshpit SGD (arXiv 2103.03239).
        min_matchmaking_time: the longest time, in seconds, to wait for known peers that have not joined; 5 by default.
            (In hivemind it is the shortest time. Here a round begins as soon as all have joined.)
        request_timeout: the time, in seconds, within which the coordinator must answer; 10 if None.
        averaging_alpha: tensors become alpha * average + (1 - alpha) * their values before; over 0 and at most 1, 1 by
            default. With another value than 1 the tensors are not bit-identical on all members.
        part_size_bytes: the size of a chunk, the unit that a round sends and reduces, in bytes of float32 before
            compression; from 16 KiB to 4 MiB, 4 MiB by default.
        allreduce_timeout: give a round up after this many seconds without any progress; 60 if None. The time during
            which a member waits for `allow_allreduce` does not count.
        next_chunk_timeout: a round excludes a member that holds it up and shows no sign of life for this many seconds;
            15 if None.
        sender_timeout: the same for members that owe parts (their inputs of chunks); `next_chunk_timeout` if None.
        reducer_timeout: the same for members that owe results (averages of chunks); twice `sender_timeout` if None.
        compression: how chunks are encoded; equal on all peers. None (default): not at all. `Compression.of` combines
            one compression for parts with another one for results.
        error_feedback: the share of a lossy `compression`'s past errors that is added to the tensors when they are
            sent: over 0 and at most 1 (all of the error), or None (default) for none. Use it for tensors that are new
            in each round, such as gradients: then compression only delays what it loses. The errors are updated only
            when a round has succeeded. They take 4 bytes per element of host memory, and as much again during a round.
            Peers may choose different values. Source: see `shoal.averaging.residual`.
        state_compression: how `load_state_from_peers` of other peers receives tensors; None (default): uncompressed. It
            can't be one that `Compression.of` has made.
        tensor_infos: the name and role of each tensor, for a `compression` that chooses by them; equal on all peers.
        bandwidth: this peer's bandwidth, in any unit that all peers share. A peer with more bandwidth reduces more.
            None (default): if no peer gives one, what this peer's links carried in its last rounds; otherwise the mean
            of the given ones.
        min_vector_size: a member that would reduce fewer elements than this reduces none; 0 by default.
        client_mode: if True, this peer never listens and reduces nothing, but gets the exact average. None (default):
            the same as the DHT.
        auxiliary: if True, this peer only reduces: it lends bandwidth, and neither contributes nor receives tensors.
        allow_state_sharing: whether to answer `load_state_from_peers` of other peers. None (default): only if `mode` is
            `Role.NODE`.
        shutdown_timeout: how long `shutdown` waits for the averager to stop, in seconds; 5 by default.
        membership: for a closed run (`prefix="name@key"`): the line that `shoal keys admit` has printed, or the path of
            a file with that line, or a function that returns the line or the path. A file or a function is read again
            before the membership expires.
        declare_state_period: has no effect. (hivemind lists donors in the DHT periodically; here a peer asks every
            member of the run.)
        daemon: has no effect. (There is no process that could be a daemon.)

    Attributes:
        mode: the `Role` of this peer in a round.
        total_size: the number of elements that are averaged.
        schema_hash: 32 bytes. Averagers have the same hash if their tensors have the same shapes and dtypes in the same
            order.
        last_round: a `RoundReport` of the last step that succeeded, or None.
        state_sharing_priority: `load_state_from_peers` of other peers prefers peers with a higher priority. 0 at first.
        tensor_infos: as given.
        in_step: whether all members make their steps together; False at first. If True, a member that misses a round
            fetches its result; otherwise it joins the next round.

    Raises:
        ValueError: if a tensor is not of floating point, was made within `torch.inference_mode()` or shares memory with
            another, if an option is out of range, or if options contradict each other.
    """

    @holding
    @neutral
    def __init__(
        self,
        averaged_tensors: Sequence[torch.Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0,
        request_timeout: float | None = None,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 1 << 22,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: Compression | None = None,
        error_feedback: float | None = None,
        state_compression: Compression | None = None,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        allow_state_sharing: bool | None = None,
        declare_state_period: float = 30.0,
        client_mode: bool | None = None,
        daemon: bool = True,
        shutdown_timeout: float = 5.0,
        membership: Source | None = None,
    ) -> None:
        self.dht, self.auxiliary, self._client_mode = dht, auxiliary, client_mode
        if client_mode is not None or dht.is_alive():
            self._check_role()
        if bandwidth is not None and not 0 <= bandwidth < math.inf:
            raise ValueError(f"bandwidth={bandwidth}: give a number that is not negative")
        if target_group_size is not None and target_group_size < min_group_size:
            raise ValueError(f"target_group_size={target_group_size} is less than min_group_size={min_group_size}")
        if not 0 < averaging_alpha <= 1:
            raise ValueError(f"averaging_alpha={averaging_alpha}: give a number over 0 and at most 1")
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in averaged_tensors]
        if tensor_infos is not None and [(info.shape, info.dtype) for info in tensor_infos] != shapes:
            raise ValueError("tensor_infos must have one for each of averaged_tensors, of its shape and dtype")
        if error_feedback is not None and any(info.role in STATE_ROLES for info in tensor_infos or ()):
            raise ValueError(f"error_feedback={error_feedback} is for what is new in each round, not for a state")
        for index, (_, dtype) in enumerate(shapes):
            if not dtype.is_floating_point:
                pairs = "; average a real tensor of pairs (torch.view_as_real)" if dtype.is_complex else ""
                raise ValueError(f"averaged_tensors[{index}] is of {dtype}: only floating point can be averaged{pairs}")
            if averaged_tensors[index].is_inference():
                raise ValueError(f"averaged_tensors[{index}] is {MADE_IN_INFERENCE}")
        self.set_group_bits(initial_group_bits)
        admit_to(lambda: dht.node, prefix, membership)
        layout = Layout.of(averaged_tensors).on("cpu")
        self._compression = compression or NoCompression()
        codecs = plan_for(self._compression, layout, tensor_infos)
        self._vector = Vector(layout, codecs, error_feedback=error_feedback)
        self._rules = Rules(
            sizes=layout.sizes,
            matchmaking_time=min_matchmaking_time,
            round_timeout=60.0 if allreduce_timeout is None else allreduce_timeout,
            min_group=min_group_size,
            target_group=target_group_size,
            chunk_elements=min(part_size_bytes // 4, largest_chunk(t.element_size() for t in averaged_tensors)),
            smallest_span=min_vector_size,
            element_bytes=encoded_bytes([self._vector]),
        )
        self.prefix, self.bandwidth = prefix, bandwidth
        self.total_size, self.schema_hash = sum(map(torch.numel, averaged_tensors)), layout.schema_hash
        self.averaging_alpha, self.tensor_infos = averaging_alpha, tensor_infos
        self.min_matchmaking_time, self.shutdown_timeout = min_matchmaking_time, shutdown_timeout
        self.request_timeout = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else request_timeout
        self.state_sharing_priority, self.in_step = 0.0, False
        self.lock_averaged_tensors = threading.Lock()
        self._tensors = tuple(averaged_tensors)
        self._memory = FlatBuffer.adopt(self._tensors)
        self._vector.read_from(self._memory)
        names = [info.key if isinstance(info.key, str) else "" for info in tensor_infos or ()]
        self._place = Place(  # `_average_by` sets the role
            bandwidth=bandwidth,
            chunk_timeout=next_chunk_timeout,
            sender_timeout=sender_timeout,
            reducer_timeout=reducer_timeout,
            request_timeout=self.request_timeout,
            tensors=[described("averaged_tensors", self._tensors, names)],
        )
        self._state_compression = check_for_state("state_compression", state_compression or NoCompression())
        self._shares_state = allow_state_sharing
        self._average_by(self._one_round, layout.sizes)
        self._share_by(self._snapshot)
        if start:
            self._start()

    # -- life

    @holding
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Join the run: list this peer in the DHT, and meet the members that are there. Calling this again does
        nothing.

        Args:
            await_ready: wait until the averager has joined; otherwise the first step waits.
            timeout: the longest time to wait, in seconds; None: no limit.

        With `await_ready`, it raises what `wait_until_ready` raises.
        """
        self._engine.start()
        if await_ready:
            self.wait_until_ready(timeout)

    @holding
    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until this averager has joined the run.

        Args:
            timeout: the longest time to wait, in seconds; None: no limit.

        Raises:
            RuntimeError: if the averager was not started, or was shut down.
            TimeoutError: after `timeout`; the start continues.
            Exception: the error that ended the start. `run_in_background` may be called again.
        """
        self._engine.wait_until_ready(timeout)

    def _start(self) -> None:
        """Join the run, at the end of a constructor."""
        try:
            self.run_in_background()
            check()
        except BaseException:  # Ctrl-C, too: nothing of it stays in the run
            self.shutdown()
            raise

    def _average_by(self, procedure: Procedure, sizes: tuple[int, ...], **agreed: str) -> None:
        """Let steps average by that procedure. For constructors: call this before the start.

        Args:
            sizes: the sizes of the buffers that its first round averages.
            agreed: the options of the procedure that must be equal on all peers.
        """
        self._agreed = agreed
        rules = dataclasses.replace(self._rules, sizes=sizes)
        terms, place = lambda: Terms(self.agreed_options(), self.schema_hash), self._place
        self._runs = Runs(self.dht, rules, terms, lambda: dataclasses.replace(place, role=self.mode))
        in_group = partial(self._in_group, procedure)
        self._engine = Engine(self.dht, self._enter, in_group, self.lock_averaged_tensors)

    def _share_by(self, take_snapshot: Callable[[Swarm], Awaitable[EncodedState]]) -> None:
        """Let newcomers have the state of which that makes a snapshot. For constructors: call this before the start."""
        self._take_snapshot = take_snapshot

    def _enter(self, beside: contextlib.ExitStack) -> Swarm:
        """Make this peer's part in the run. Others may ask for the state as soon as they meet this peer, so the donor
        starts first."""
        self._check_role()
        swarm = self._runs.swarm(self.prefix)
        # The state may change at any time, so it has no name, and no snapshot is offered twice.
        node, name, snapshot = self.dht.node, f"state/{self.prefix}", partial(self._take_snapshot, swarm)
        beside.callback(StateDonor(node, name, snapshot, lambda: None, swarm.gate, self._offered).close)
        beside.callback(self._runs.forget)
        return swarm

    def _offered(self) -> Offer | None:
        return Offer(self.state_sharing_priority) if self.allow_state_sharing else None

    def agreed_options(self) -> dict[str, str]:
        """The options that must be equal on all peers, as text that peers compare."""
        compression, group_size = term_of(self._compression.spec), str(self._rules.target_group)
        return {"compression": compression, "target_group_size": group_size, **self._agreed}

    def is_alive(self) -> bool:
        """Whether this averager has joined the run and was not shut down."""
        return self._engine.is_alive()

    @holding
    def shutdown(self) -> None:
        """Leave the run. A step that is under way fails with an `AveragingError`. The DHT keeps running. Calling this
        again does nothing.

        Raises:
            TimeoutError: if the averager has not stopped within `shutdown_timeout`.
        """
        self._engine.shutdown(self.shutdown_timeout)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is neither copied nor pickled, for it is a peer of the run: make a new one; save "
            "the tensors, and the state_dict() of an averager that has one"
        )

    def __enter__(self) -> DecentralizedAverager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- properties and options

    @property
    def peer_id(self) -> PeerID:
        """The id of this peer, which is its key in the result of `step`. Known as soon as the DHT was started."""
        return self.dht.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether nobody can dial this peer. If it was not given, it is that of the DHT, which must have started."""
        return self.dht.client_mode if self._client_mode is None else self._client_mode

    @property
    def mode(self) -> Role:
        """The role of this peer in rounds."""
        return Role.CLIENT if self.client_mode else Role.AUXILIARY if self.auxiliary else Role.NODE

    def _check_role(self) -> None:
        if self.auxiliary and self.client_mode:
            raise ValueError("an auxiliary averager lends bandwidth, and a client has none to lend: choose one of both")

    @property
    def allow_state_sharing(self) -> bool:
        """Whether this averager answers `load_state_from_peers` of other peers. It may be set at any time."""
        return self.mode is Role.NODE if self._shares_state is None else self._shares_state

    @allow_state_sharing.setter
    def allow_state_sharing(self, value: bool) -> None:
        self._shares_state = value

    @overload
    def get_group_bits(self, wait: Literal[True] = True) -> str: ...
    @overload
    def get_group_bits(self, wait: Literal[False]) -> Future[str]: ...
    def get_group_bits(self, wait: bool = True) -> str | Future[str]:
        """The group bits of this peer, see `initial_group_bits`. The next step averages with the peers of these bits.

        Args:
            wait: return the bits; if False, a future of them, which is done.
        """
        return self._bits if wait else _done(self._bits)

    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[True] = True) -> None: ...
    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[False]) -> Future[None]: ...
    def set_group_bits(self, group_bits: str, wait: bool = True) -> Future[None] | None:
        """Set the group bits, see `initial_group_bits`. Steps average with the peers of these bits from the next one
        on.

        Args:
            group_bits: at most 64 "0"s and "1"s; "" for one group of all peers.
            wait: return None; if False, a future, which is done.

        Raises:
            ValueError: for other bits.
        """
        if not isinstance(group_bits, str) or set(group_bits) - {"0", "1"} or len(group_bits) > 64:
            raise ValueError(f'group bits {group_bits!r}: give a text of at most 64 "0"s and "1"s')
        self._bits = group_bits
        return None if wait else _done(None)

    # -- averaging

    @contextlib.contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """A context in which the averaged tensors may be read and changed in place. Inside it no round reads or writes
        them, so a step that needs them waits.

        Yields:
            The averaged tensors, in the order in which they were given.
        """
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
    ) -> StepControl: ...
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
    ) -> Gathered | StepControl: ...
    @holding
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> Gathered | StepControl:
        """Join one round. Afterwards the tensors hold the weighted mean of all members' tensors, the same bits on all
        members (with `averaging_alpha=1`).

        An averager runs its steps one after another, in the order of the calls. A round writes the tensors only when it
        has succeeded. So no tensor is averaged twice if a step fails, is cancelled or joins another round.

        Args:
            gather: plain data (numbers, strings, bytes, lists, dictionaries) that every member receives; at most 64 KiB
                as msgpack.
            scheduled_time: the latest time at which the round begins, in seconds of `get_dht_time()`; by default
                `min_matchmaking_time` seconds from now.
            weight: the weight of this peer's tensors in the mean, from 0 to 1e15. None (default): 1, or 0 if this peer
                is auxiliary.
            timeout: seconds until the step fails; by default it fails 60 seconds after `scheduled_time`.
            allow_retries: if a round fails, join another one as long as `timeout` allows.
            require_trigger: join a round, but read the tensors only after the user has called `allow_allreduce` of the
                control. The other members wait. Needs `wait=False`.
            wait: return the result; if False, return a `StepControl`, which is a future of the result.

        Returns:
            What each member gave as `gather`, by peer id. A member's value is None if it gave nothing, or data that
            can't be read. All values are None if this peer missed the round and fetched its result.

        Raises:
            AveragingError: if there is no result in time, if a round fails and no other one can be joined, or if the
                averager is shut down meanwhile.
            RuntimeError: if the averager was not started, or was shut down.
            ValueError: if `weight` is out of range, or not 0 on an auxiliary peer; if `scheduled_time` is later than
                `timeout`; if `gather` is no plain data or takes more than 64 KiB; for `require_trigger` without
                `wait=False`.
        """
        self.wait_until_ready()
        if wait and require_trigger:
            raise ValueError("require_trigger=True needs wait=False: a caller that waits can't call allow_allreduce()")
        weight = float(not self.auxiliary) if weight is None else weight
        if check_weight(weight) and self.auxiliary:
            raise ValueError(f"weight={weight!r}: an auxiliary averager contributes nothing")
        now = get_dht_time()
        patience = self.min_matchmaking_time if scheduled_time is None else max(0.0, scheduled_time - now)
        timeout = patience + DEFAULT_TIMEOUT if timeout is None else timeout
        if scheduled_time is not None and patience > timeout:
            raise ValueError(f"scheduled_time is in {patience:.1f} s, which does not fit within timeout={timeout}")
        control = StepControl(now + patience, now + timeout, allow_retries, weight, encode_gathered(gather))
        if not require_trigger:
            control.allow_allreduce()
        self._engine.step(control, Swarm.catch_up if self.in_step else None)
        return result_of(control) if wait else control

    @property
    def got_on_at(self) -> float:
        """The time at which the round of the current step last made progress, in seconds of `time.monotonic`; minus
        infinity if no step is in a round."""
        return self._engine.got_on_at

    @property
    def last_round(self) -> RoundReport | None:
        """The report of the last step that succeeded, or None."""
        return self._engine.last_round

    async def _in_group(self, procedure: Procedure, swarm: Swarm, attempt: Attempt) -> Outcome:
        """Average in the run that the group bits name, if there are any."""
        self._runs.forget()
        if not self._bits:
            return await procedure(swarm, attempt)
        async with self._runs.joined(f"{self.prefix}.0b{self._bits}") as group:
            outcome = await procedure(group, attempt)
        self._bits = next_bits(self._bits, outcome.begin, self.peer_id.key, self._rules.target_group)
        return outcome

    async def _one_round(self, swarm: Swarm, attempt: Attempt) -> Outcome:
        """Average the vector in a round of the run, and write the result to the tensors."""
        outcome = await attempt.average(swarm, self._vector, self._read)
        await attempt.take_tensors()
        if not self.auxiliary:
            self._vector.settle(outcome)
            self._write()
        return outcome

    async def _read(self) -> None:
        """Copy the averaged tensors to the host, unless they are on the host."""
        if self._vector.inputs is not self._memory:
            for host, tensor in zip(self._vector.inputs.flat, self._memory.flat, strict=True):
                host.copy_(tensor)

    def _write(self) -> None:
        """Set the averaged tensors to the average."""
        for tensor, output in zip(self._memory.flat, self._vector.outputs.flat, strict=True):
            if self.averaging_alpha == 1:
                tensor.copy_(output)
            else:
                tensor.lerp_(output.to(tensor.device), self.averaging_alpha)

    # -- state

    @neutral
    def get_current_state(self) -> tuple[Any, ...]:
        """The state that other peers get from `load_state_from_peers`. Subclasses may override it.

        Returns:
            (plain data, copies of tensors, infos). The infos are None, or a `CompressionInfo` for each tensor, by which
            `state_compression` may choose a codec. Subclasses may leave them out.
        """
        with self.get_tensors() as tensors:
            copies = Copies.of(tensors)
        return {"group_key": self.get_group_bits()}, copies, self.tensor_infos

    @overload
    def load_state_from_peers(self, wait: Literal[True] = True, timeout: float | None = None) -> State | None: ...
    @overload
    def load_state_from_peers(self, wait: Literal[False], timeout: float | None = None) -> Future[State | None]: ...
    @holding
    @neutral
    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None
    ) -> State | Future[State | None] | None:
        """Download the state that most peers hold, see `get_current_state`. Peers with the highest
        `state_sharing_priority` are preferred. This averager does not change.

        Args:
            wait: return the result; if False, a future of it.
            timeout: give up after this many seconds without any progress; 60 if None.

        Returns:
            (plain data, CPU tensors); None, with a warning in the log, if no peer shares a state.

        Raises:
            AveragingError: if peers share a state, but none could send it; if it can't be read; or if this averager is
                not running.
        """
        future = self._engine.submit(self._load_state(60.0 if timeout is None else timeout))
        return result_of(future) if wait else future

    async def _load_state(self, timeout: float) -> State | None:
        try:
            state = await self._download(timeout)
            with memory_for("the state that was downloaded", NoMemoryForState):
                return msgspec.msgpack.decode(state.scalars), state.tensors()
        except NothingShared as error:
            log.warning("%s", error)
            return None
        except (ValueError, RecursionError) as error:
            raise AveragingError(f"the state that was downloaded can't be read: {error}") from error

    async def _download(self, timeout: float) -> Downloaded:
        if (swarm := self._engine.swarm) is None:
            raise AveragingError(NOT_STARTED)
        members = swarm.peer.view.connected()
        donors = [m.peer for m in members if m.role is not Role.AUXILIARY and m.peer != self.peer_id]
        relayed = [m.peer for m in members if m.is_relayed]
        rng, name = random.Random(self.peer_id.key), f"state/{self.prefix}"
        return await download_state(self.dht.node, name, donors, timeout=timeout, rng=rng, relayed=relayed)

    async def _snapshot(self, swarm: Swarm) -> EncodedState:
        def take() -> FrozenState:
            data, tensors, *infos = self.get_current_state()
            memory = (tensors if isinstance(tensors, Copies) else Copies.of(tensors)).memory
            return FrozenState.of(swarm.tip, memory, data, plan_for(self._state_compression, memory.layout, *infos))

        # In one expression, so that the tensors are released before the snapshot is encoded.
        return await asyncio.to_thread(lambda: encoded(take()))


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
