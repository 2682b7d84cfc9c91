"""The optimizer that users hold: a torch optimizer whose step is made by a whole swarm."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.contribution import Contribution, Outcome
from shoal.averaging.coordinator import Rules
from shoal.averaging.directory import DHTDirectory
from shoal.averaging.donor import Snapshot, StateDonor
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.exchange import compute_serially
from shoal.averaging.member import Member, Role
from shoal.averaging.messages import Terms
from shoal.averaging.swarm import Swarm
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import download_state
from shoal.compression import Codec, NoCompression
from shoal.dht.dht import DHT
from shoal.optim.gradients import GradientBuffers
from shoal.optim.options import check_times, machine, refuse_not_built
from shoal.optim.progress import ProgressTracker
from shoal.optim.reports import DownloadReport, EpochReport, Event
from shoal.optim.state import TrainingState
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class Optimizer(torch.optim.Optimizer):
    """Trains one model together with all peers of the run, as one process with `target_batch_size` would.

    >>> dht = shoal.DHT(initial_peers=[...], start=True)
    >>> optimizer = shoal.Optimizer(
    ...     dht=dht, run_id="my run", target_batch_size=4096, batch_size_per_step=32,
    ...     params=model.parameters(), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    ... )
    >>> for batch in data:
    ...     loss(model, batch).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    `step` adds the gradients in `.grad` to this peer's sum. When all peers together have accumulated
    `target_batch_size` samples, the next `step` of each averages the gradients, weighted by samples, makes the wrapped
    optimizer's step with them, steps the scheduler, and a new *epoch* begins. A peer that starts late, or falls out of
    step, downloads the state from the others in its next `step`, and what it had accumulated is dropped.

    The parameters and the optimizer's state move into flat memory (`parameter.data` becomes a view of it).

    Args:
        dht: this peer's place in the DHT, started. It stays when the optimizer is shut down.
        run_id: names the run: peers of one run_id train together.
        target_batch_size: samples of all peers per epoch.
        batch_size_per_step: samples behind the gradients of one `step`, unless it is told otherwise.
        optimizer: a torch optimizer, or a function that makes one from `params`.
        params: parameters or parameter groups; only with an `optimizer` function.
        scheduler: a torch scheduler of the (wrapped) optimizer, or a function that makes one from it; stepped once per
            epoch.
        matchmaking_time: when a round is called, at most so many seconds are waited for members that have not come.
        averaging_timeout: seconds from joining a round to its result; after that this peer goes on with its own gradients,
            and downloads the state when it finds the others again.
        allreduce_timeout: seconds from the beginning of a round to its result; `averaging_timeout` when None.
        next_chunk_timeout: seconds of silence after which a member that holds up a round is left out; 5 when None.
        load_state_timeout: seconds that a download may take.
        client_mode: never listen and reduce nothing; None: as the DHT.
        grad_compression: how gradients travel.
        load_state_compression: how this peer sends its state to newcomers.
        extra_tensors: shared with newcomers beside the parameters and the optimizer's state.
        performance_ema_alpha: weight of the newest measurement in the moving average of samples per second.
        shutdown_timeout: seconds that `shutdown` waits.
        verbose: log at INFO what happens to the run.

    The other arguments of `hivemind.Optimizer` raise NotImplementedError that names them until they work.

    Attributes:
        on_event: called in the trainer's thread with an `EpochReport` or `DownloadReport`, if it is not None.
        tracker: the run's progress, see `ProgressTracker`.

    Raises ValueError for arguments that make no sense, NotImplementedError for those that do not work yet.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        params: Params | None = None,
        scheduler: LRScheduler | SchedulerFactory | None = None,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        load_state_timeout: float = 600.0,
        reuse_grad_buffers: bool = False,
        offload_optimizer: bool | None = None,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        delay_state_averaging: bool = True,
        average_state_every: int = 1,
        use_local_updates: bool = False,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        grad_compression: Codec | None = None,
        grad_averager_factory: Callable[..., Any] | None = None,
        state_averaging_compression: Codec | None = None,
        load_state_compression: Codec | None = None,
        average_opt_statistics: Iterable[str] = (),
        extra_tensors: Iterable[torch.Tensor] = (),
        averager_opts: Mapping[str, Any] | None = None,
        tracker_opts: Mapping[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5,
        verbose: bool = False,
    ) -> None:
        refuse_not_built(locals())
        check_times(
            {
                "matchmaking_time": matchmaking_time,
                "averaging_timeout": averaging_timeout,
                "allreduce_timeout": allreduce_timeout,
                "next_chunk_timeout": next_chunk_timeout,
                "load_state_timeout": load_state_timeout,
            }
        )
        if not target_batch_size >= 1:
            raise ValueError(f"target_batch_size={target_batch_size!r}: give a number of samples, at least 1")
        if batch_size_per_step is not None and not batch_size_per_step >= 0:
            raise ValueError(f"batch_size_per_step={batch_size_per_step!r}: give a number of samples, at least 0")
        if verbose:
            logging.getLogger("shoal").setLevel(logging.INFO)
        wrapped = _make_optimizer(optimizer, params)
        self.optimizer = wrapped
        self.scheduler = _make_scheduler(scheduler, wrapped)
        self.dht, self.run_id = dht, run_id
        self.target_batch_size, self.batch_size_per_step = target_batch_size, batch_size_per_step
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self.averaging_timeout, self.load_state_timeout = averaging_timeout, load_state_timeout
        self.shutdown_timeout = shutdown_timeout
        self.on_event: Callable[[Event], None] | None = None
        self._ready = False
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups, self.state = wrapped.param_groups, wrapped.state
        self._ready = True

        codec = grad_compression or NoCompression()
        self._state_lock = threading.Lock()  # held while the state changes, and while a donor copies it
        self._state = TrainingState(wrapped, self.scheduler, list(extra_tensors))
        self._gradients = GradientBuffers([p for p in self._state.parameters if p.requires_grad], codec)
        self._digest = self._state.digest()
        self._applied = Tip.genesis(run_id)  # the state that the parameters are at
        self._state_changed = asyncio.Event()
        self._machine = machine()
        # Every argument that must be equal in a run, by its name; what a peer may choose for itself is not here.
        options = {
            "target_batch_size": str(target_batch_size),
            "optimizer": type(wrapped).__name__,
            "scheduler": type(self.scheduler).__name__,
            "grad_compression": codec.spec,
            "state_averaging_compression": (state_averaging_compression or NoCompression()).spec,
            "load_state_compression": (load_state_compression or NoCompression()).spec,
            "matchmaking_time": f"{matchmaking_time:g}",
            "averaging_timeout": f"{averaging_timeout:g}",
            "average_state_every": str(average_state_every),
            "delay_state_averaging": str(delay_state_averaging),
        }
        rules = Rules(
            sizes=tuple(spec.numel for spec in self._gradients.layout.buffers),
            matchmaking_time=matchmaking_time,
            round_timeout=allreduce_timeout or averaging_timeout,
            target_samples=float(target_batch_size),
        )
        terms = Terms(options, self._gradients.layout.schema_hash)
        self._swarm, self._donor = dht.reactor.run(
            self._start(terms, rules, next_chunk_timeout, load_state_compression or NoCompression())
        )
        self.tracker = ProgressTracker(
            self._swarm, dht.reactor, target_batch_size, performance_ema_alpha=performance_ema_alpha
        )
        self._closed = False
        self._be_counted()

    def _be_counted(self) -> None:
        """Report no samples: from now on the coordinator waits for this peer."""
        try:
            self.tracker.report_local_progress(0.0)
        except Behind:
            log.info("the run has begun: the first step downloads the state")

    async def _start(
        self, terms: Terms, rules: Rules, chunk_timeout: float | None, codec: Codec
    ) -> tuple[Swarm, StateDonor]:
        compute_serially()
        node, dht_node = self.dht.node, self.dht.dht_node
        addresses = () if self.client_mode else tuple(str(address) for address in dht_node.visible_addresses())[:8]
        me = Member(node.peer_id.key, addresses, Role.CLIENT if self.client_mode else Role.NODE)
        directory = DHTDirectory(dht_node, self.run_id)
        swarm = Swarm(node, directory, self.run_id, me, terms, rules, chunk_timeout=chunk_timeout)
        donor = StateDonor(node, f"state/{self.run_id}", self._take_snapshot, lambda: swarm.tip, codec)
        try:
            await swarm.start()
        except BaseException:
            donor.close()
            raise
        return swarm, donor

    # -- training

    @property
    def local_epoch(self) -> int:
        """How many epochs this peer's parameters have behind them."""
        return self._applied.epoch

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor | None:
        """Add the gradients in `.grad` to this epoch, and end the epoch if the peers have enough samples.

        Args:
            closure: evaluated first, with gradients enabled; its result is returned.
            batch_size: samples over which `.grad` is the mean; `batch_size_per_step` by default. With 0, `.grad` is not
                looked at, and what is due is taken part in.
            grad_scaler: not built yet.

        Raises AveragingError if the run refuses this peer, with the argument that differs; what else goes wrong on the
        network is logged and dealt with.
        """
        if grad_scaler is not None:
            raise NotImplementedError("step(grad_scaler=…) does not work yet")
        if self._closed:
            raise RuntimeError("this optimizer was shut down")
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("step needs batch_size=…, since the optimizer was made without batch_size_per_step")
        if not batch_size >= 0:
            raise ValueError(f"batch_size={batch_size!r}: give a number of samples, at least 0")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_behind():
            self._synchronise()
        elif batch_size:
            self._gradients.accumulate(batch_size)
        try:
            self.tracker.report_local_progress(self._gradients.samples)
            if self.tracker.ready_to_update_epoch:
                self._update()
        except Behind as error:
            log.info("%s", error)
            self._synchronise()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `.grad`, as torch does; what was accumulated by `step` stays."""
        self.optimizer.zero_grad(set_to_none)

    def _is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's, or this peer could not apply a commit."""
        swarm = self._swarm
        return swarm.behind is not None and swarm.behind.outranks(self._applied)

    def _update(self) -> None:
        """End the epoch: average, step, and begin the next."""
        gradients = self._gradients
        gradients.finish()
        contribution = Contribution(
            weight=gradients.samples,
            open=lambda begin, send, fault: gradients.open(self._swarm.me.key, begin, send, fault),
            patience=self._swarm.rules.matchmaking_time,
            tip=self._applied,
            machine=self._machine,
            state=self._digest,
        )
        try:
            outcome = self.dht.reactor.run(self._swarm.average(contribution, self.averaging_timeout))
        except (Behind, Rejected):
            raise
        except AveragingError as error:
            self._go_on_alone(error)
            return
        if agreeing := self._disagrees_with(outcome):
            self._synchronise(agreeing)
            return
        self._apply(outcome.commit.next_tip)
        self._tell(self._report(outcome))

    def _apply(self, tip: Tip) -> None:
        """Make the wrapped optimizer's step with the averaged gradients; the state is `tip` then."""
        with self._state_lock:
            with self._gradients.as_grad():
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self._state.adopt_statistics()
            self._applied = tip
        self._tell_waiting_donor()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._gradients.reset()
        self._digest = self._state.digest()
        self.tracker.start_epoch()

    def _go_on_alone(self, error: AveragingError) -> None:
        """No round could be had: step with what this peer has, and let the swarm decide later whose state is kept."""
        gradients = self._gradients
        if not gradients.is_finite():
            log.warning("no average (%s), and this peer's gradients are not finite: they are dropped", error)
            self._begin_epoch()
            return
        log.warning("no average (%s): going on with this peer's own gradients", error)
        gradients.use_local()
        tip = self._applied.after(self._digest, gradients.samples)
        self._apply(tip)
        self.dht.reactor.run(self._move(tip))

    def _disagrees_with(self, outcome: Outcome) -> list[PeerID]:
        """If the state from which this round began is another here than at most members: those members, to download
        from. Peers that compute alike only ever disagree at the start of a run (they made their parameters each for
        themselves) or by a fault; others may round their steps differently, and are made equal again here."""
        begin = outcome.begin
        states = [state for state in begin.states if state]
        common = max(states, key=lambda state: (states.count(state), state), default=b"")
        mine = next((s for m, s in zip(begin.members, begin.states, strict=True) if m.key == self._swarm.me.key), b"")
        if not mine or mine == common:
            return []
        agreeing = [i for i, state in enumerate(begin.states) if state == common]
        if self._applied.epoch and any(begin.machines[i] == self._machine for i in agreeing):
            log.error("this peer's parameters differ from those of peers that compute alike: downloading the state")
        return [begin.members[i].peer for i in agreeing]

    # -- the state

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state that most peers hold, and go on from it. Returns False if there is nobody to ask.

        Args: timeout: seconds; `load_state_timeout` by default.
        Raises AveragingError, with each donor and its reason, if nobody could bring it; then nothing has changed.
        """
        timeout = kwargs.pop("timeout", self.load_state_timeout)
        if kwargs:
            raise TypeError(f"load_state_from_peers has no argument {', '.join(kwargs)}")
        members = self._swarm.neighbourhood.connected()
        donors = [m.peer for m in members if m.peer != self.dht.peer_id and m.role is Role.NODE]
        if donors:
            self._download(donors, timeout)
        return bool(donors)

    def _download(self, donors: Sequence[PeerID], timeout: float) -> None:
        me = self._swarm.me.key
        state = self.dht.reactor.run(
            download_state(
                self.dht.node, f"state/{self.run_id}", donors, timeout=timeout, rng=random.Random(me + self._digest)
            )
        )
        with self._state_lock:
            self._state.load(state)
            self._applied = state.manifest.tip
        self.dht.reactor.run(self._move(self._applied))
        self._tell_waiting_donor()
        self._begin_epoch()
        digest = self._digest.hex()
        report = DownloadReport(self._applied.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest)
        log.info("downloaded the state of epoch %d from %d peers", report.epoch, report.donors)
        self._tell(report)

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Download the state; if that fails, go on and try again in the next step."""
        try:
            if donors:
                self._download(donors, self.load_state_timeout)
            else:
                self.load_state_from_peers()
        except AveragingError as error:
            log.warning("could not download the state, the next step tries again: %s", error)

    async def _move(self, tip: Tip) -> None:
        self._swarm.move(tip)

    def _tell_waiting_donor(self) -> None:
        self.dht.reactor.loop.call_soon_threadsafe(self._state_changed.set)

    async def _take_snapshot(self) -> Snapshot:
        # What is offered is the newest state: a commit that is not applied yet is waited for.
        while self._applied != self._swarm.tip:
            self._state_changed.clear()
            await self._state_changed.wait()

        def copy() -> Snapshot:
            with self._state_lock:
                return self._state.snapshot(self._applied)

        return await asyncio.get_running_loop().run_in_executor(None, copy)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with the epoch (`["state"]["local_epoch"]`), the run's lineage and the
        scheduler beside it, all plain data and tensors."""
        state = self.optimizer.state_dict()
        tip = self._applied
        state["state"] = {**state["state"], "local_epoch": tip.epoch}
        state["shoal"] = {"lineage": tip.lineage, "samples": tip.samples}
        if self.scheduler is not None:
            state["shoal"]["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, or of the wrapped optimizer's (then at the present epoch).

        Raises ValueError, as the wrapped optimizer does, if it is of other parameter groups.
        """
        inner = dict(state_dict["state"])
        epoch = inner.pop("local_epoch", None)
        ours = state_dict.get("shoal", {})
        with self._state_lock:
            self.optimizer.load_state_dict({**state_dict, "state": inner})
            self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
            if self.scheduler is not None and "scheduler" in ours:
                self.scheduler.load_state_dict(ours["scheduler"])
            self._state.adopt_statistics()
            if epoch is not None:
                lineage = ours.get("lineage", self._applied.lineage)
                samples = ours.get("samples", float(epoch * self.target_batch_size))
                self._applied = Tip(epoch, lineage, samples)
        self.dht.reactor.run(self._move(self._applied))
        self._begin_epoch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers must have the same parameters from the beginning."""
        if self._ready:
            raise NotImplementedError("the parameters of a run are fixed: give all groups when making the optimizer")
        super().add_param_group(param_group)

    # -- the rest

    def _report(self, outcome: Outcome) -> EpochReport:
        return EpochReport(
            epoch=self._applied.epoch,
            samples=outcome.commit.samples,
            num_peers=len(outcome.begin.members),
            coordinator=str(outcome.coordinator),
            round_seconds=outcome.matchmaking_seconds + outcome.allreduce_seconds,
            matchmaking_seconds=outcome.matchmaking_seconds,
            allreduce_seconds=outcome.allreduce_seconds,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            state_digest=self._digest.hex(),
        )

    def _tell(self, event: Event) -> None:
        log.info("%s", event)
        if self.on_event is not None:
            self.on_event(event)

    def shutdown(self) -> None:
        """Leave the run; the parameters stay usable, and so does the DHT. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True

        async def stop() -> None:
            self._swarm.stop()
            self._donor.close()

        if self.dht.is_alive():
            try:
                self.dht.reactor.submit(stop()).result(self.shutdown_timeout)
            except (TimeoutError, CancelledError):
                log.warning("leaving the run took longer than %g s", self.shutdown_timeout)

    def __repr__(self) -> str:
        return f"shoal.Optimizer(run_id={self.run_id!r}, epoch={self.local_epoch}, optimizer={self.optimizer!r})"


def _make_optimizer(
    optimizer: torch.optim.Optimizer | OptimizerFactory, params: Params | None
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("optimizer= is a ready optimizer, which has its parameters: leave params= out")
        return optimizer
    if not callable(optimizer):
        raise ValueError(f"optimizer={optimizer!r}: give a torch optimizer, or a function that makes one from params")
    if params is None:
        raise ValueError("optimizer= is a function, which needs params=: the model's parameters or parameter groups")
    made = optimizer(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer= made {type(made).__name__}, which is not a torch.optim.Optimizer")
    return made


def _make_scheduler(
    scheduler: LRScheduler | SchedulerFactory | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    if scheduler is None:
        return None
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise ValueError("scheduler= is of another optimizer than the one given: make it from that one")
        return scheduler
    if not callable(scheduler):
        raise ValueError(f"scheduler={scheduler!r}: give a torch scheduler, or a function that makes one")
    return scheduler(optimizer)
