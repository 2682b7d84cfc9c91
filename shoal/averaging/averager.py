"""The public face of a round: tensors that peers average whenever they call `step`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, overload

import torch

from shoal.averaging.control import Gathered, StepControl
from shoal.averaging.exchange import compute_serially
from shoal.averaging.options import (
    check_bits,
    check_group,
    check_role,
    check_tensors,
    check_weight_of_role,
    described,
    term_of,
)
from shoal.averaging.shared_state import snapshot_of, state_of
from shoal.averaging.stepping import Stepping
from shoal.compression import Compression, CompressionInfo, NoCompression
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.contribution import encode_gathered
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Place, Swarm
from shoal.transfer.donor import EncodedState, Snapshot, StateDonor, encoded
from shoal.transfer.transfer import Downloaded, NothingShared, download_state

log = logging.getLogger(__name__)

State = tuple[Any, list[torch.Tensor]]

DEFAULT_TIMEOUT = 60.0  # of a step, in seconds beyond the time at which it is scheduled
REQUEST_TIMEOUT = 10.0
NOT_STARTED = "this averager was not started, or was shut down"


class DecentralizedAverager(Stepping):
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
        initial_group_bits: "0"s and "1"s. If there are any, a step averages with those who have the same bits only, and
            its round moves the bits on by this peer's place in the group. So the averages of groups of
            `target_group_size` M out of M**d peers spread to all peers in d rounds (Moshpit SGD).
        min_matchmaking_time: at most so many seconds are waited for members that are known and have not joined. (The
            reference waits at least so long; here a round begins as soon as all have joined.)
        request_timeout: seconds that whoever coordinates may take to answer; 10 when None.
        averaging_alpha: tensors become alpha * average + (1 - alpha) * what they were. With another number than 1 they
            are not the same bits on all members.
        part_size_bytes: of what is sent and reduced at a time, as float32 before compression; from 16 KiB to 4 MiB.
        allreduce_timeout: seconds without any progress after which a round is given up; 60 when None. Does not count
            while a member waits for its trigger.
        next_chunk_timeout: seconds without a sign of life after which a member that holds up a round is left out; 15
            when None.
        sender_timeout: the same of members that owe parts; `next_chunk_timeout` when None.
        reducer_timeout: the same of members that owe averages; twice `sender_timeout` when None.
        compression: how chunks travel; must be equal on all peers.
        state_compression: how `load_state_from_peers` sends tensors.
        tensor_infos: name and role of each tensor, for a `compression` that chooses by them; equal on all peers.
        bandwidth: how much this peer can carry, in any unit that all peers share; its part of the reducing is in
            proportion.
        min_vector_size: members that would reduce fewer elements than this reduce none.
        client_mode: never listen and reduce nothing, but get the exact average; None: as the DHT.
        auxiliary: only reduce: lend bandwidth, contribute and receive nothing.
        allow_state_sharing: answer `load_state_from_peers` of others; by default nodes do.
        shutdown_timeout: seconds that `shutdown` waits for the round that is under way to end.
        declare_state_period, daemon: accepted and without effect. The reference lists donors in the DHT ever so often;
            here every member of the run is asked. There is no process that could be a daemon.

    Attributes:
        last_round: a `RoundReport` of the last step that succeeded, or None.
        state_sharing_priority: `load_state_from_peers` of others prefers peers with more. 0 at first.
        tensor_infos: as given.

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
    ) -> None:
        client_mode = dht.client_mode if client_mode is None else client_mode
        check_role(client_mode, auxiliary, bandwidth)
        check_group(target_group_size, min_group_size)
        check_bits(initial_group_bits)
        check_tensors(averaged_tensors, tensor_infos)
        if not 0 < averaging_alpha <= 1:
            raise ValueError(f"averaging_alpha={averaging_alpha}: give a number over 0 and at most 1")
        rules = Rules(
            sizes=(),  # until the vector is made
            matchmaking_time=min_matchmaking_time,
            round_timeout=60.0 if allreduce_timeout is None else allreduce_timeout,
            min_group=min_group_size,
            target_group=target_group_size,
            chunk_elements=min(part_size_bytes // 4, largest_chunk(t.element_size() for t in averaged_tensors)),
            smallest_span=min_vector_size,
        )
        super().__init__(
            averaged_tensors,
            dht,
            prefix,
            rules,
            compression=compression if compression is not None else NoCompression(),
            infos=tensor_infos,
            auxiliary=auxiliary,
            averaging_alpha=averaging_alpha,
            group_bits=initial_group_bits,
        )
        self.client_mode, self.bandwidth = client_mode, bandwidth
        self.min_matchmaking_time, self.shutdown_timeout = min_matchmaking_time, shutdown_timeout
        self.request_timeout = REQUEST_TIMEOUT if request_timeout is None else request_timeout
        self.state_sharing_priority, self.tensor_infos = 0.0, tensor_infos
        self._shares_state = not client_mode and not auxiliary if allow_state_sharing is None else allow_state_sharing
        self._state_compression = state_compression if state_compression is not None else NoCompression()
        names = [info.key if isinstance(info.key, str) else "" for info in tensor_infos or ()]
        self._place = Place(
            role=self.mode,
            bandwidth=bandwidth,
            chunk_timeout=next_chunk_timeout,
            sender_timeout=sender_timeout,
            reducer_timeout=reducer_timeout,
            request_timeout=self.request_timeout,
            tensors=[described("averaged_tensors", self._tensors, names)],
        )
        self._starting: Future[None] | None = None  # from start to shutdown
        self._donor: StateDonor | None = None
        self._snapshots = itertools.count()
        if start:
            self.run_in_background()

    # -- life

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Be reachable: be listed in the DHT, and meet the members that are there.

        Args:
            await_ready: wait until that is done; else before the first step.
            timeout: of that wait, see `wait_until_ready`.
        """
        if self._starting is None:
            self._starting = self.dht.reactor.submit(self._start())
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until this averager is reachable, at most `timeout` seconds. Raises RuntimeError if it was not started,
        or was shut down; TimeoutError, which ends the waiting only; and what has ended the start."""
        if (starting := self._starting) is None:
            raise RuntimeError(NOT_STARTED)
        try:
            starting.result(timeout)
        except CancelledError:
            raise RuntimeError(NOT_STARTED) from None
        except BaseException:  # whatever ended the start, which may be tried again
            if starting.done() and self._starting is starting:
                self._starting = None
            raise

    async def _start(self) -> None:
        compute_serially()
        swarm = self._make_swarm(self.prefix, DHTDirectory(self.dht.dht_node, self.prefix), self._rules)
        donor = self._donor = StateDonor(
            self.dht.node,
            f"state/{self.prefix}",
            self._take_snapshot,
            # What is shared may change at any time, so no snapshot that was taken before is offered again.
            lambda: Tip.genesis(f"{self.prefix} {next(self._snapshots)}"),
            allow=self._shares_state,
            priority=lambda: self.state_sharing_priority,
        )
        try:
            await swarm.start()
        except BaseException:  # cancelled by shutdown(), too: who did not start must not stay listed
            swarm.stop()
            donor.close()
            raise
        self._swarm = swarm

    def _make_swarm(self, run_id: str, directory: Directory, rules: Rules) -> Swarm:
        addresses = self.dht.dht_node.visible_addresses()
        terms = Terms(self.agreed_options(), self.schema_hash)
        return Swarm(self.dht.node, addresses, directory, run_id, terms, rules, self._place)

    def agreed_options(self) -> dict[str, str]:
        """The options that must be equal on all peers, as they compare them."""
        return {
            "compression": term_of(self._compression.spec),
            "target_group_size": str(self._rules.target_group),
        }

    def is_alive(self) -> bool:
        """Whether this averager is reachable."""
        return self._starting is not None and self._swarm is not None

    def shutdown(self) -> None:
        """Leave the run; a step that is under way fails. The DHT stays. Calling it again does nothing."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()  # no effect on one that is done
        if not self.dht.is_alive():
            self._swarm = None
            return

        async def stop() -> None:
            swarm, self._swarm = self._swarm, None
            if swarm is None:
                return  # it was starting, and has been told to end that
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._runs.forget()
            swarm.stop()
            if self._donor is not None:
                self._donor.close()

        self.dht.reactor.submit(stop()).result(self.shutdown_timeout)

    def __enter__(self) -> DecentralizedAverager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- what it is

    @property
    def mode(self) -> Role:
        """What this peer does in a round."""
        return Role.CLIENT if self.client_mode else Role.AUXILIARY if self.auxiliary else Role.NODE

    @property
    def total_size(self) -> int:
        """How many numbers are averaged."""
        return sum(tensor.numel() for tensor in self._tensors)

    @property
    def schema_hash(self) -> bytes:
        """Equal (32 bytes) for averagers of tensors of the same shapes and dtypes in the same order."""
        return self._vector.layout.schema_hash

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
        """Take part in one round: on return the tensors hold the weighted mean, the same bits on all members.

        Args:
            gather: plain data (numbers, strings, bytes, lists, dictionaries) that every member gets; at most 64 KiB.
            scheduled_time: when the round shall begin at the latest, in seconds of `get_dht_time()`; by default in
                `min_matchmaking_time` seconds.
            weight: of this peer's tensors in the mean, at least 0; 1 by default, 0 for an auxiliary.
            timeout: seconds until this fails; by default 60 beyond `scheduled_time`.
            allow_retries: join another round if one fails, as long as `timeout` allows.
            require_trigger: join a round, but do not read the tensors before `allow_allreduce` of the control is
                called; the other members wait for it. Only with `wait=False`.
            wait: return the result; if False, a `StepControl`, which is a future of it.

        Steps of one averager are taken one after another, in the order in which they were called. A round writes the
        tensors when it has succeeded, and not before: one that fails, is cancelled or tried again averages nothing
        twice.

        Returns: what all members gathered, by peer id; None of a member that gathered nothing, or nothing that can be
            read, and of all if this peer missed the round and only got its result.
        Raises AveragingError if there is no result in time or the averager is shut down, ValueError for arguments that
            make no sense.
        """
        self.wait_until_ready()
        if wait and require_trigger:
            raise ValueError("require_trigger=True needs wait=False: who waits can't call allow_allreduce()")
        if weight is None:
            weight = 0.0 if self.auxiliary else 1.0
        check_weight_of_role(weight, self.auxiliary)
        now = get_dht_time()
        patience = self.min_matchmaking_time if scheduled_time is None else max(0.0, scheduled_time - now)
        timeout = patience + DEFAULT_TIMEOUT if timeout is None else timeout
        if scheduled_time is not None and patience > timeout:
            raise ValueError(f"scheduled_time is in {patience:.1f} s, which does not fit within timeout={timeout}")
        control = StepControl(now + patience, now + timeout, allow_retries, weight, encode_gathered(gather))
        if not require_trigger:
            control.allow_allreduce()
        control.attach(self._submit(self._step(control)), lambda: self._call_soon(self._reschedule, control))
        if not wait:
            return control
        try:
            return control.result()
        except BaseException:  # Ctrl-C too: nobody waits for it any more
            control.cancel()
            raise

    # -- state

    def get_current_state(self) -> tuple[Any, ...]:
        """What `load_state_from_peers` gives to others: (plain data, tensors, a `CompressionInfo` for each tensor, by
        which a `state_compression` may choose, or None). Meant to be overridden; the third may be left out then."""
        with self.get_tensors() as tensors:
            copies = [tensor.detach().clone() for tensor in tensors]
        return {"group_key": self.get_group_bits()}, copies, self.tensor_infos

    @overload
    def load_state_from_peers(self, wait: Literal[True] = True, timeout: float | None = None) -> State | None: ...
    @overload
    def load_state_from_peers(self, wait: Literal[False], timeout: float | None = None) -> Future[State | None]: ...
    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None
    ) -> State | Future[State | None] | None:
        """Download the state that the majority of the peers has; see `get_current_state`.

        Of peers with different `state_sharing_priority` those with the highest are preferred.

        Returns (plain data, tensors), or None, with a warning, if no peer shares a state. Nothing of this averager
        changes.
        Raises AveragingError if peers share one but none could bring it within `timeout` seconds (60 when None).
        """
        future = self._submit(self._load_state(60.0 if timeout is None else timeout))
        return future.result() if wait else future

    async def _load_state(self, timeout: float) -> State | None:
        try:
            return state_of(await self._download(timeout))
        except NothingShared as error:
            log.warning("%s", error)
            return None
        except ValueError as error:
            raise AveragingError(f"the state that was downloaded can't be read: {error}") from error

    async def _download(self, timeout: float) -> Downloaded:
        swarm = self._swarm
        if swarm is None:
            raise AveragingError(NOT_STARTED)
        members = swarm.peer.view.connected()
        donors = [m.peer for m in members if m.role is not Role.AUXILIARY and m.peer != self.peer_id]
        rng = random.Random(self.peer_id.key)
        return await download_state(self.dht.node, f"state/{self.prefix}", donors, timeout=timeout, rng=rng)

    async def _take_snapshot(self) -> EncodedState:
        swarm = self._swarm
        assert swarm is not None

        def take() -> Snapshot:
            if type(self).get_current_state is DecentralizedAverager.get_current_state:
                with self.get_tensors() as mine:  # one copy instead of two
                    data = {"group_key": self.get_group_bits()}
                    return snapshot_of(swarm.tip, data, mine, self._state_compression, self.tensor_infos)
            data, tensors, *infos = self.get_current_state()
            return snapshot_of(swarm.tip, data, tensors, self._state_compression, *infos)

        # In one expression, so that the tensors are let go of before it is encoded.
        return await asyncio.to_thread(lambda: encoded(take()))
