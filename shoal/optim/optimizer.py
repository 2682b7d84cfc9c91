"""The optimizer that users hold: a torch optimizer whose step is made by a whole swarm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.contribution import Contribution, Outcome
from shoal.averaging.donor import Snapshot
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.messages import Terms
from shoal.averaging.options import refuse_not_built, term_of
from shoal.averaging.rules import Rules
from shoal.averaging.tip import Tip
from shoal.compression import Compression, NoCompression
from shoal.dht.dht import DHT
from shoal.flat import Layout
from shoal.optim import options
from shoal.optim.gradients import GradientBuffers
from shoal.optim.progress import ProgressTracker
from shoal.optim.replica import Replica
from shoal.optim.reports import DownloadReport, EpochReport, Event
from shoal.optim.run import Run
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)


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
        averaging_timeout: seconds from joining a round to its result; after that this peer goes on with its own
            gradients, and downloads the state when it finds the others again.
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
        optimizer: torch.optim.Optimizer | options.OptimizerFactory,
        params: options.Params | None = None,
        scheduler: LRScheduler | options.SchedulerFactory | None = None,
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
        grad_compression: Compression | None = None,
        grad_averager_factory: Callable[..., Any] | None = None,
        state_averaging_compression: Compression | None = None,
        load_state_compression: Compression | None = None,
        average_opt_statistics: Iterable[str] = (),
        extra_tensors: Iterable[torch.Tensor] = (),
        averager_opts: Mapping[str, Any] | None = None,
        tracker_opts: Mapping[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5,
        verbose: bool = False,
    ) -> None:
        refuse_not_built(locals(), options.NOT_BUILT)
        times = {
            "matchmaking_time": matchmaking_time,
            "averaging_timeout": averaging_timeout,
            "allreduce_timeout": averaging_timeout if allreduce_timeout is None else allreduce_timeout,
            "next_chunk_timeout": 5.0 if next_chunk_timeout is None else next_chunk_timeout,
            "load_state_timeout": load_state_timeout,
            "shutdown_timeout": shutdown_timeout,
        }
        options.check_times(times)
        options.check_run_id(run_id)
        options.check_samples({"target_batch_size": target_batch_size}, least=1)
        if batch_size_per_step is not None:
            options.check_samples({"batch_size_per_step": batch_size_per_step}, least=0)
        options.check_compressions(
            {"grad_compression": grad_compression, "load_state_compression": load_state_compression}
        )
        options.check_alpha(performance_ema_alpha)
        client_mode = dht.client_mode if client_mode is None else client_mode
        if dht.client_mode and not client_mode:
            raise ValueError("client_mode=False, but the DHT is in client mode and can't be dialled: leave it out")
        if verbose:
            _show_what_happens()
        self.optimizer = wrapped = options.make_optimizer(optimizer, params)
        self.scheduler = options.make_scheduler(scheduler, wrapped)
        self.dht, self.run_id, self.client_mode = dht, run_id, client_mode
        self.target_batch_size, self.batch_size_per_step = target_batch_size, batch_size_per_step
        self.on_event: Callable[[Event], None] | None = None
        self._times = times
        self._ready = self._closed = False
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups, self.state = wrapped.param_groups, wrapped.state
        self._ready = True

        grad_compression = grad_compression or NoCompression()
        self._load_state_compression = load_state_compression or NoCompression()
        extra_tensors = list(extra_tensors)
        self._replica = Replica(wrapped, self.scheduler, extra_tensors, Tip.genesis(run_id))
        self._gradients = GradientBuffers(self._replica.trained, grad_compression)
        self._state_changed = asyncio.Event()
        self._machine = options.machine()
        # Every argument that must be equal in a run, by its name; what a peer may choose for itself is not here.
        agreed = {
            "target_batch_size": str(target_batch_size),
            "optimizer": type(wrapped).__name__,
            "scheduler": type(self.scheduler).__name__,
            "grad_compression": term_of(grad_compression.spec),
            "matchmaking_time": f"{matchmaking_time:g}",
            "averaging_timeout": f"{averaging_timeout:g}",
            "allreduce_timeout": str(allreduce_timeout),
            "next_chunk_timeout": str(next_chunk_timeout),
            "extra_tensors": Layout.of(extra_tensors).schema_hash.hex(),
        }
        layout = self._gradients.layout
        self._run = Run(
            dht,
            run_id,
            Terms(agreed, layout.schema_hash),
            Rules(
                sizes=tuple(spec.numel for spec in layout.buffers),
                matchmaking_time=matchmaking_time,
                round_timeout=times["allreduce_timeout"],
                target_samples=float(target_batch_size),
            ),
            client_mode=client_mode,
            chunk_timeout=next_chunk_timeout,
            take_snapshot=self._take_snapshot,
        )
        self._run.start()
        self.tracker = ProgressTracker(
            self._run.swarm, dht.reactor, target_batch_size, performance_ema_alpha=performance_ema_alpha
        )
        self._be_counted()

    def _be_counted(self) -> None:
        """Report no samples: from now on the coordinator waits for this peer."""
        try:
            self.tracker.report_local_progress(0.0)
        except Behind:
            log.info("the run has begun: the first step downloads the state")
        except BaseException:  # Ctrl-C too: an optimizer that was not made must not be counted by the others
            self.shutdown()
            raise

    # -- training

    @property
    def local_epoch(self) -> int:
        """How many epochs this peer's parameters have behind them."""
        return self._replica.tip.epoch

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
        options.check_samples({"batch_size": batch_size}, least=0)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_behind():
            self._synchronise()
        elif batch_size:
            self._accumulate(batch_size)
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

    def _accumulate(self, batch_size: int) -> None:
        if any(parameter.grad is not None for parameter in self._replica.frozen):
            raise ValueError(
                "a parameter that was frozen (requires_grad=False) when the optimizer was made has a gradient now; the "
                "peers do not average it: make a new optimizer, under a new run_id, after thawing parameters"
            )
        self._gradients.accumulate(batch_size)

    def _is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's."""
        behind = self._run.swarm.behind
        return behind is not None and behind.outranks(self._replica.tip)

    def _update(self) -> None:
        """End the epoch: average, step, and begin the next."""
        outcome = self._average()
        if outcome is None:
            return
        if agreeing := self._disagrees_with(outcome):
            self._synchronise(agreeing)
            return
        self._apply(outcome.commit.next_tip)
        self._tell(self._report(outcome))

    def _average(self) -> Outcome | None:
        """The round of this epoch; None if there was none and this peer has gone on alone."""
        gradients, until = self._gradients, time.monotonic() + self._times["averaging_timeout"]
        gradients.finish()
        if not gradients.is_finite():
            log.warning("this peer's gradients are not finite (NaN or infinity): it joins without them")
            gradients.reset()
            gradients.finish()
        contribution = Contribution(
            weight=gradients.samples,
            open=lambda begin, send, fault: gradients.open(self._run.me, begin, send, fault),
            patience=self._times["matchmaking_time"],
            tip=self._replica.tip,
            machine=self._machine,
            state=self._replica.digest,
        )
        while True:
            try:
                return self._run.average(contribution, until - time.monotonic())
            except (Behind, Rejected):
                raise
            except AveragingError as error:
                if time.monotonic() >= until:
                    self._go_on_alone(error)
                    return None
                # Whoever is put out of a round gets its result as one who missed it.
                log.warning("%s: trying again", error)

    def _apply(self, tip: Tip) -> None:
        """Make the wrapped optimizer's step with the averaged gradients; the state is `tip` then."""
        self._replica.step(self._gradients, tip)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.dht.reactor.loop.call_soon_threadsafe(self._state_changed.set)
        self._gradients.reset()
        self.tracker.start_epoch(self._replica.tip)

    def _go_on_alone(self, error: AveragingError) -> None:
        """No round could be had: step with what this peer has, and let the swarm decide later whose state is kept."""
        gradients = self._gradients
        if not gradients.samples:
            log.warning("no average (%s), and this peer has no gradients of its own: the next step tries again", error)
            return
        tip = self._replica.tip.after(self._replica.digest, gradients.samples)
        if self._run.follow(tip, after=self._replica.tip):
            log.warning("no average (%s): going on with this peer's own gradients", error)
            gradients.use_local()
            self._apply(tip)

    def _disagrees_with(self, outcome: Outcome) -> list[PeerID]:
        """If the state from which this round began is another here than at most members: those members, to download
        from. Peers that compute alike only ever disagree at the start of a run (they made their parameters each for
        themselves) or by a fault; others may round their steps differently, and are made equal again here."""
        begin = outcome.begin
        states = [state for state in begin.states if state]
        common = max(states, key=lambda state: (states.count(state), state), default=b"")
        mine = next((s for m, s in zip(begin.members, begin.states, strict=True) if m.key == self._run.me), b"")
        if not mine or mine == common:
            return []
        agreeing = [i for i, state in enumerate(begin.states) if state == common]
        if self._replica.tip.epoch and any(begin.machines[i] == self._machine for i in agreeing):
            log.error("this peer's parameters differ from those of peers that compute alike: downloading the state")
        return [begin.members[i].peer for i in agreeing]

    # -- the state

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state that most peers hold, and go on from it. Returns False, and keeps what is here, if there
        is nobody to ask or if the peers' state has fewer samples behind it.

        Args: timeout: seconds; `load_state_timeout` by default.
        Raises AveragingError, with each donor and its reason, if nobody could bring it; then nothing has changed.
        """
        timeout = kwargs.pop("timeout", self._times["load_state_timeout"])
        if kwargs:
            raise TypeError(f"load_state_from_peers has no argument {', '.join(kwargs)}")
        options.check_times({"timeout": timeout})
        donors = self._run.donors()
        return bool(donors) and self._download(donors, timeout)

    def _download(self, donors: Sequence[PeerID], timeout: float) -> bool:
        state = self._run.download(donors, timeout, self._replica.max_nbytes)
        tip = state.manifest.tip
        if self._replica.tip.outranks(tip):
            log.info("the peers' state, of epoch %d, is behind this peer's, of epoch %d", tip.epoch, self.local_epoch)
            return False
        try:
            self._replica.load(state)
        except ValueError as error:
            raise Rejected(f"the run's state does not fit this peer: {error}") from error
        self._run.follow(tip)
        self._begin_epoch()
        digest = self._replica.digest.hex()
        report = DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest)
        log.info("downloaded the state of epoch %d from %d peers", report.epoch, report.donors)
        self._tell(report)
        return True

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Download the state; if that fails, go on and try again in the next step. Raises Rejected if it can't fit."""
        try:
            if self._download(donors, self._times["load_state_timeout"]) if donors else self.load_state_from_peers():
                return
        except Rejected:
            raise
        except AveragingError as error:
            log.warning("could not download the state, the next step tries again: %s", error)
        self._run.forget_behind()

    async def _take_snapshot(self) -> Snapshot:
        # What is offered is the newest state: a commit that is not applied yet is waited for.
        while self._replica.tip != self._run.tip:
            self._state_changed.clear()
            await self._state_changed.wait()
        if self._is_behind():
            raise Refused("this peer is behind the others itself")

        try:
            return await asyncio.to_thread(self._replica.snapshot, self._load_state_compression)
        except ValueError as error:
            log.warning("a newcomer can't have this peer's state: %s", error)
            raise Refused(str(error)) from error

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with the epoch (`["state"]["local_epoch"]`), the run's lineage and the
        scheduler beside it, all plain data and tensors."""
        return self._replica.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, or of the wrapped optimizer's (then at the present epoch). Load the
        model's parameters first. The dict is copied.

        Raises ValueError, as the wrapped optimizer does, if it is of other parameter groups.
        """
        self._replica.load_state_dict(state_dict, self.target_batch_size)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._run.follow(self._replica.tip)
        self._begin_epoch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers must have the same parameters from the beginning."""
        if self._ready:
            raise NotImplementedError("the parameters of a run are fixed: give all groups when making the optimizer")
        super().add_param_group(param_group)

    # -- the rest

    def _report(self, outcome: Outcome) -> EpochReport:
        return EpochReport(
            epoch=self._replica.tip.epoch,
            samples=outcome.commit.samples,
            num_peers=len(outcome.begin.members),
            coordinator=str(outcome.coordinator),
            round_seconds=outcome.matchmaking_seconds + outcome.allreduce_seconds,
            matchmaking_seconds=outcome.matchmaking_seconds,
            allreduce_seconds=outcome.allreduce_seconds,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            state_digest=self._replica.digest.hex(),
        )

    def _tell(self, event: Event) -> None:
        log.info("%s", event)
        if self.on_event is not None:
            self.on_event(event)

    def shutdown(self) -> None:
        """Leave the run; the parameters stay usable, and so does the DHT. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._run.stop(self._times["shutdown_timeout"])

    def __repr__(self) -> str:
        return f"shoal.Optimizer(run_id={self.run_id!r}, epoch={self.local_epoch}, optimizer={self.optimizer!r})"


def _show_what_happens() -> None:
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
