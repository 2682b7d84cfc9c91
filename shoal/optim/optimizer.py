"""The optimizer that users hold: a torch optimizer whose step is made by a whole swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.contribution import Contribution, Outcome
from shoal.averaging.donor import Snapshot
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.messages import Terms
from shoal.averaging.options import term_of
from shoal.averaging.tip import Tip
from shoal.compression import Compression, NoCompression
from shoal.dht.dht import DHT
from shoal.flat import Layout
from shoal.optim import options
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradients import GradientBuffers, Gradients
from shoal.optim.own_gradients import AveragerGradients
from shoal.optim.progress import RunProgress
from shoal.optim.refresh import Refresh, refresh_of
from shoal.optim.replica import Replica
from shoal.optim.reports import DownloadReport, EpochReport, Event
from shoal.optim.run import Run
from shoal.optim.settings import Settings, check_samples, check_times
from shoal.optim.update import Averaged, Background, EpochEnd
from shoal.optim.vector import EpochVector
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
        reuse_grad_buffers: accumulate in `.grad` itself, which saves the memory of a second gradient; `zero_grad`
            raises then, and each step of an epoch counts alike. Mixed precision needs `shoal.GradScaler` with it.
        offload_optimizer: keep the optimizer's parameters and state on the host, and step there; the device keeps the
            model's parameters and gradients. Needs `params`. By default only where steps are delayed, which needs it.
        delay_optimizer_step: step in the background; the trainer goes on with the old parameters, and the new ones are
            set in a later `step`, at most one epoch late. By default as `delay_grad_averaging`.
        delay_grad_averaging: average in the background too.
        delay_state_averaging: with local updates, average in the background; what the trainer changes meanwhile is
            kept. If False, `step` waits for the average.
        average_state_every: average parameters (where peers hold unlike ones), chosen statistics and extra tensors at
            the end of every so-many-th epoch.
        use_local_updates: every `step` steps the wrapped optimizer with this peer's own gradients, and the state is
            averaged at the end of an epoch, weighted by samples. The scheduler is still stepped once per epoch.
        client_mode: never listen and reduce nothing; None: as the DHT.
        auxiliary: train nothing, and lend bandwidth to those who train: `step()` waits for a round, at most for
            `matchmaking_time`, and takes part in it.
        grad_compression: how gradients travel.
        grad_averager_factory: makes an object that accumulates and averages the gradients instead, as
            `shoal.GradientAverager` does: called with the trained parameters and `dht`, `prefix`, `start=False`, times
            and more. It is started when this peer trains.
        state_averaging_compression: how the state travels when it is averaged.
        load_state_compression: how this peer sends its state to newcomers; statistics of the optimizer only if they are
            averaged, since nothing else makes them equal again.
        average_opt_statistics: names of tensors in the optimizer's state, of their parameter's shape, that are averaged
            with the parameters.
        extra_tensors: shared with newcomers beside the parameters and the optimizer's state; those of floating point
            are averaged too.
        averager_opts: `bandwidth` (of this peer, in any unit that all share), `request_timeout` (seconds that a
            coordinator may take to answer; 10), `min_matchmaking_time` and `next_chunk_timeout` (in place of the
            arguments).
        tracker_opts: of `ProgressTracker`.
        performance_ema_alpha: weight of the newest measurement in the moving average of samples per second.
        shutdown_timeout: seconds that `shutdown` waits.
        verbose: log at INFO what happens to the run.
        max_grad_norm: scale the averaged gradient down if its norm over all parameters is larger than this.
        min_peers: no epoch ends with fewer peers that train. `step` waits for them, at most for `matchmaking_time`, and
            then goes on accumulating.

    All peers of a run need equal options, but for batch_size_per_step, client_mode, auxiliary, reuse_grad_buffers,
    offload_optimizer, verbose, and `bandwidth` in averager_opts: a peer that differs is told so by an AveragingError
    with the option's name, here or in its first `step`.

    Attributes:
        on_event: called in the trainer's thread with an `EpochReport` or `DownloadReport`, if it is not None.
        tracker: the run's progress, see `RunProgress`.

    Raises ValueError for arguments that make no sense, alone or together.
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
        max_grad_norm: float | None = None,
        min_peers: int = 1,
    ) -> None:
        client_mode = dht.client_mode if client_mode is None else client_mode
        if dht.client_mode and not client_mode:
            raise ValueError("client_mode=False, but the DHT is in client mode and can't be dialled: leave it out")
        self._settings = settings = Settings.of(
            locals(),
            client_mode=client_mode,
            average_opt_statistics=tuple(average_opt_statistics or ()),
            own_averager=grad_averager_factory is not None,
            averager_opts=averager_opts or {},
        )
        refresh = refresh_of(tracker_opts)
        if verbose:
            _show_what_happens()
        self._host = options.host_copy(optimizer, params) if settings.offload_optimizer else None
        params = params if self._host is None else self._host.groups
        self.optimizer = wrapped = options.make_optimizer(optimizer, params)
        self.scheduler = options.make_scheduler(scheduler, wrapped)
        self.dht, self.run_id, self.client_mode, self.auxiliary = dht, run_id, client_mode, auxiliary
        self.target_batch_size, self.batch_size_per_step = target_batch_size, batch_size_per_step
        self.use_local_updates, self.reuse_grad_buffers = use_local_updates, reuse_grad_buffers
        self.on_event: Callable[[Event], None] | None = None
        self._ready = self._closed = False
        groups: Any = wrapped.param_groups if self._host is None else self._host.param_groups(wrapped)
        super().__init__([dict(group) for group in groups], wrapped.defaults)
        self.param_groups, self.state = groups, wrapped.state
        self._ready = True

        extra_tensors = list(extra_tensors)
        self._replica = Replica(
            wrapped,
            self.scheduler,
            extra_tensors,
            Tip.genesis(run_id),
            host=self._host,
            statistics=settings.average_opt_statistics,
            compression=settings.state_averaging_compression,
        )
        self._gradients = self._make_gradients(grad_averager_factory)
        self._local_samples = 0.0  # with local updates: since the epoch began
        self._scaler: GradScaler | None = None  # of the gradients that are accumulated
        self._state_changed = asyncio.Event()
        self._machine = options.machine()
        self._downloads = 0  # since the last epoch that this peer was in
        self._lossy_epoch = -1  # of the last state that was downloaded through a lossy codec
        self._applied = self._counting = self._replica.tip  # of the model, and of what is accumulated
        self._start_run(extra_tensors, refresh)
        self.tracker = RunProgress(
            self._run.swarm,
            dht.reactor,
            target_batch_size,
            performance_ema_alpha=performance_ema_alpha,
            refresh=refresh,
            may_wait=not settings.in_background,
        )
        self.tracker.start()
        if not self._is_behind():
            self._enter()
        self._be_counted()

    def _make_gradients(self, factory: Callable[..., Any] | None) -> Gradients | None:
        settings = self._settings
        if settings.use_local_updates:
            return None
        if factory is not None:
            return AveragerGradients(
                self.dht.peer_id.key,
                factory,
                self._replica.trained,
                dht=self.dht,
                prefix=f"{self.run_id}/grad",
                min_group_size=1,
                min_matchmaking_time=settings.matchmaking_time,
                allreduce_timeout=settings.allreduce_timeout,
                next_chunk_timeout=settings.next_chunk_timeout,
                shutdown_timeout=settings.shutdown_timeout,
                client_mode=settings.client_mode,
                reuse_grad_buffers=settings.reuse_grad_buffers,
                compression=settings.grad_compression,
                bandwidth=settings.averager_opts.get("bandwidth"),
            )
        assert settings.grad_compression is not None
        return GradientBuffers(
            self._replica.trained,
            settings.grad_compression,
            apart=bool(settings.delay_optimizer_step),
            reuse=settings.reuse_grad_buffers,
        )

    def _start_run(self, extra_tensors: Sequence[torch.Tensor], refresh: Refresh) -> None:
        settings, replica = self._settings, self._replica
        gradients = self._gradients if isinstance(self._gradients, GradientBuffers) else None
        sizes = () if gradients is None else tuple(spec.numel for spec in gradients.layout.buffers)
        rules = settings.rules(sizes, replica.buffers.sizes, replica.shared.sizes)
        schemas = [replica.shared.layout.schema_hash]
        if gradients is not None:
            schemas.append(gradients.layout.schema_hash)
        agreed = settings.agreed() | {
            "tracker_opts": term_of(str(refresh)),
            "optimizer": type(self.optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
            "extra_tensors": Layout.of(extra_tensors).schema_hash.hex(),
        }
        if isinstance(self._gradients, AveragerGradients):
            agreed["grad_averager_factory"] = term_of(self._gradients.terms)
        self._run = Run(
            self.dht,
            self.run_id,
            Terms(agreed, blake3(b"".join(schemas)).digest()),
            rules,
            role=settings.role,
            bandwidth=settings.averager_opts.get("bandwidth"),
            chunk_timeout=settings.next_chunk_timeout,
            request_timeout=settings.averager_opts.get("request_timeout"),
            take_snapshot=self._take_snapshot,
        )
        self._vector = EpochVector(self._run.me, rules, gradients, replica)
        self._rules = rules
        self._end = EpochEnd(
            self._run,
            rules,
            replica,
            self._vector,
            self._gradients,
            machine=self._machine,
            matchmaking_time=settings.matchmaking_time,
            averaging_timeout=settings.averaging_timeout,
            min_peers=settings.min_peers,
            max_grad_norm=settings.max_grad_norm,
            tell_changed=self._tell_changed,
        )
        self._background = Background(self._end, steps=not settings.use_local_updates)
        self._run.start()

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
        """How many epochs the model's parameters have behind them. While the end of an epoch is computed in the
        background, the optimizer's own copy may be one further."""
        return self._applied.epoch

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> torch.Tensor | None:
        """Add the gradients in `.grad` to this epoch, and end the epoch if the peers have enough samples.

        Args:
            closure: evaluated first, with gradients enabled; its result is returned.
            batch_size: samples over which `.grad` is the mean; `batch_size_per_step` by default. With 0, `.grad` is not
                looked at, and what is due is taken part in.
            grad_scaler: by which the loss was scaled: the gradients are unscaled, and not used if they overflowed.

        Raises AveragingError if the run refuses this peer, with the argument that differs, and what was raised in the
        background since the last call; what else goes wrong on the network is logged and dealt with.
        """
        if self._closed:
            raise RuntimeError("this optimizer was shut down")
        if self.auxiliary:
            if closure is not None or batch_size is not None or grad_scaler is not None:
                raise ValueError("auxiliary=True trains nothing: call step() without arguments")
            self._assist()
            return None
        if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
            raise ValueError(f"grad_scaler= is a {type(grad_scaler).__name__}: give a shoal.GradScaler")
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("step needs batch_size=…, since the optimizer was made without batch_size_per_step")
        check_samples({"batch_size": batch_size}, least=0)
        self._take_result(wait=False)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_behind():
            self._synchronise()
        elif batch_size:
            self._use_gradients(batch_size, grad_scaler)
        self._count_and_update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `.grad`, as torch does; what was accumulated by `step` stays. Raises ValueError with
        `reuse_grad_buffers`, where it would not."""
        if self.reuse_grad_buffers:
            raise ValueError(
                "reuse_grad_buffers=True accumulates in .grad, which zero_grad would lose: do not call it, .grad is "
                "cleared when the epoch ends"
            )
        super().zero_grad(set_to_none)

    def _use_gradients(self, batch_size: int, grad_scaler: GradScaler | None) -> None:
        if any(parameter.grad is not None for parameter in self._replica.frozen):
            raise ValueError(
                "a parameter that was frozen (requires_grad=False) when the optimizer was made has a gradient now; the "
                "peers do not average it: make a new optimizer, under a new run_id, after thawing parameters"
            )
        if grad_scaler is not None and not grad_scaler.admits(self):
            log.info("the gradients overflowed (grad_scaler): they are not used")
            if self.reuse_grad_buffers:
                self._begin_accumulating()  # what came before is in the same `.grad`
        elif self._gradients is None:
            self._replica.step_locally()
            self._local_samples += batch_size
        else:
            self._enter()
            self._gradients.accumulate(batch_size)
            self._scaler = grad_scaler if self.reuse_grad_buffers else None

    def _enter(self) -> None:
        """Be known to those who average gradients, before the run counts on this peer."""
        if isinstance(self._gradients, AveragerGradients):
            self._gradients.enter(lambda: self._run.swarm.called or self._run.tip != self._replica.tip)

    @property
    def _samples(self) -> float:
        """That this peer has accumulated in this epoch."""
        return self._local_samples if self._gradients is None else self._gradients.samples

    def _begin_accumulating(self) -> None:
        self._local_samples = 0.0
        if self._gradients is not None:
            self._gradients.reset()
        if self._scaler is not None:
            self._scaler.release(self)
            self._scaler = None

    # -- the end of an epoch

    def _count_and_update(self) -> None:
        """Report what was accumulated, and end the epoch if that is due."""
        if self._background.failed:
            self._background.begin(self._background.samples)
        if self._background.busy:
            tip = self._background.tip
            if tip is not None:
                self._count_from(tip)
            elif self._samples < (self._background.samples or self.target_batch_size):
                return  # the round is under way, and what is accumulated belongs to an epoch without a name yet
            else:
                self._take_result(wait=True)  # this peer has its part of that epoch: one epoch late is the most
                if self._background.failed:
                    return  # the next step tries again
        try:
            self.tracker.report_local_progress(self._samples)
            if self.tracker.ready_to_update_epoch:
                if self._background.busy:
                    self._take_result(wait=True)  # one epoch late is the most
                with self.tracker.paused():
                    self._update()
        except Behind as error:
            log.info("%s", error)
            if self._background.busy:
                self._take_result(wait=True)
            self._synchronise()

    def _update(self) -> None:
        """End the epoch, or begin to in the background."""
        settings = self._settings
        if self._end.few_are_here():
            return
        own = isinstance(self._gradients, AveragerGradients) and not self._gradients.held
        if own and self._run.tip != self._replica.tip:
            raise Behind("the epoch has ended before this peer's gradients were averaged")
        self._end.take()
        samples = self._samples
        if self._gradients is not None:
            usable = self._gradients.close(1.0 if self._scaler is None else self._scaler.get_scale())
            if usable < samples:
                log.warning("this peer's gradients are not finite (NaN or infinity): it joins without them")
            samples = usable
        if settings.averages_in_background:
            self._begin_accumulating()
            self._background.begin(samples)
            return
        averaged = self._end.average(samples)
        if averaged is None:
            return
        if averaged.donors or not settings.delay_optimizer_step:
            if not averaged.donors:
                self._end.step(averaged)
            self._apply(averaged)
        else:
            self._begin_accumulating()
            self._background.begin(samples, averaged)
            self._count_from(averaged.tip)

    def _take_result(self, *, wait: bool) -> None:
        """If an epoch was ended in the background: apply it."""
        if not self._background.busy or not (wait or self._background.done):
            return
        try:
            with self.tracker.paused():
                averaged = self._background.take()
        except Behind as error:
            log.info("%s", error)
            self._synchronise()
            return
        if averaged is not None:
            if self._gradients is None:
                self._end.step(averaged)  # in this thread: it changes what the trainer computes with
            self._apply(averaged, accumulating=True)

    def _apply(self, averaged: Averaged, *, accumulating: bool = False) -> None:
        """The step was made: go on from the state that it led to. With `accumulating`, the next epoch has begun."""
        if averaged.donors:
            self._synchronise(averaged.donors)
            return
        if averaged.outcome is not None and self._rules.due_sizes and self._rules.is_due(averaged.tip.epoch - 1):
            self._replica.put_buffers()
        # What is not averaged was downloaded exactly, and is still the others' if no step was made since.
        if averaged.with_state and (self._replica.is_averaged_whole or averaged.tip.epoch == self._lossy_epoch + 1):
            self._end.machine = self._machine
        self._replica.publish()
        self._downloads = 0
        self._applied = averaged.tip
        if not accumulating:
            self._begin_accumulating()
        self._count_from(averaged.tip)
        if averaged.outcome is not None:
            self._tell(self._report(averaged.outcome))

    def _count_from(self, tip: Tip) -> None:
        if self._counting != tip:
            self._counting = tip
            self.tracker.start_epoch(tip)

    def _is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's."""
        behind = self._run.swarm.behind
        return behind is not None and not self._background.busy and behind.outranks(self._replica.tip)

    def _assist(self) -> None:
        """As an auxiliary: take part in the next round."""
        settings = self._settings
        try:
            self._applied = self._replica.tip = self._run.catch_up()
            self._count_from(self._applied)
            self.tracker.report_local_progress(0.0)
            if not self._run.wait_for_call(settings.matchmaking_time):
                return
            outcome = self._run.average(
                Contribution(0.0, self._vector.open, settings.matchmaking_time, machine=self._machine),
                settings.averaging_timeout,
            )
        except Rejected:
            raise
        except AveragingError as error:
            log.info("no round to assist in: %s", error)
            return
        self._applied = self._replica.tip = outcome.commit.next_tip
        self._count_from(self._applied)
        self._tell(self._report(outcome))

    # -- the state

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state that most peers hold, and go on from it. Returns False, and keeps what is here, if there
        is nobody to ask or if the peers' state has fewer samples behind it.

        Args: timeout: seconds; `load_state_timeout` by default.
        Raises AveragingError, with each donor and its reason, if nobody could bring it; then nothing has changed.
        """
        timeout = kwargs.pop("timeout", self._settings.load_state_timeout)
        if kwargs:
            raise TypeError(f"load_state_from_peers has no argument {', '.join(kwargs)}")
        check_times({"timeout": timeout})
        self._take_result(wait=True)
        donors = self._run.donors()
        return bool(donors) and self._download(donors, timeout)

    def _download(self, donors: Sequence[PeerID], timeout: float) -> bool:
        # What takes longer than an epoch would come too late each time. So the others are asked to wait, but not always
        # where that does not help either: the 2nd, 4th, 8th time.
        if isinstance(self._gradients, AveragerGradients):
            self._gradients.leave()
        self._downloads += 1
        awaited = self._downloads > 1 and self._downloads.bit_count() == 1
        state = self._run.download(donors, timeout, self._replica.max_nbytes, awaited)
        tip = state.manifest.tip
        if self._replica.tip.outranks(tip):
            log.info("the peers' state, of epoch %d, is behind this peer's, of epoch %d", tip.epoch, self.local_epoch)
            return False
        try:
            self._replica.load(state)
        except ValueError as error:
            raise Rejected(f"the run's state does not fit this peer: {error}") from error
        self._run.follow(tip)
        self._go_on_from(tip)
        if state.lossy:  # it may differ from those that compute alike, until the state is averaged
            self._lossy_epoch = tip.epoch
            self._end.machine = f"{self._run.me.hex()[:16]} after a lossy download, {self._machine}"[:256]
        digest = self._replica.digest.hex()
        report = DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest)
        log.info("downloaded the state of epoch %d from %d peers", report.epoch, report.donors)
        self._tell(report)
        return True

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Download the state; if that fails, go on and try again in the next step. Raises Rejected if it can't fit."""
        try:
            if self._download(donors, self._settings.load_state_timeout) if donors else self.load_state_from_peers():
                return
        except Rejected:
            raise
        except AveragingError as error:
            log.warning("could not download the state, the next step tries again: %s", error)
        self._run.forget_behind()

    def _go_on_from(self, tip: Tip) -> None:
        """The replica is at another state, not by a round."""
        self._tell_changed()
        self._background.failed = False
        self._begin_accumulating()
        self._applied = self._counting = tip
        self._enter()
        self.tracker.start_epoch(tip)
        self.tracker.restart_clock()

    def _tell_changed(self) -> None:
        self.dht.reactor.loop.call_soon_threadsafe(self._state_changed.set)

    async def _take_snapshot(self) -> Snapshot:
        # What is offered is the newest state: a commit that is not applied yet is waited for.
        while self._replica.tip != self._run.tip:
            self._state_changed.clear()
            await self._state_changed.wait()
        if self._is_behind():
            raise Refused("this peer is behind the others itself")
        compression = self._settings.load_state_compression or NoCompression()
        try:
            return await asyncio.to_thread(self._replica.snapshot, compression)
        except ValueError as error:
            log.warning("a newcomer can't have this peer's state: %s", error)
            raise Refused(str(error)) from error

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with the epoch (`["state"]["local_epoch"]`), the run's lineage and the
        scheduler beside it, all plain data and tensors. What is under way in the background is waited for and applied
        first, so that the model's parameters belong to it."""
        self._take_result(wait=True)
        return self._replica.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, or of the wrapped optimizer's (then at the present epoch). Load the
        model's parameters first. The dict is copied.

        Raises ValueError, as the wrapped optimizer does, if it is of other parameter groups.
        """
        self._take_result(wait=True)
        if isinstance(self._gradients, AveragerGradients):
            self._gradients.leave()
        self._replica.load_state_dict(state_dict, self.target_batch_size)
        if self._host is None:
            self.param_groups = self.optimizer.param_groups
        else:
            self.param_groups = self._host.param_groups(self.optimizer)  # type: ignore[assignment]
        self.state = self.optimizer.state
        self._run.follow(self._replica.tip)
        self._go_on_from(self._replica.tip)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: all peers must have the same parameters from the beginning."""
        if self._ready:
            raise ValueError("the parameters of a run are fixed: give all groups when making the optimizer")
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
        """Leave the run; the parameters stay usable, and so does the DHT. A round in the background ends without a
        result, a step is waited for and applied. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        timeout = self._settings.shutdown_timeout
        self._end.stop()
        if self.dht.is_alive():
            self.tracker.stop()
        self._run.stop(timeout)
        if isinstance(self._gradients, AveragerGradients):
            self._gradients.averager.shutdown()  # whose average may be waited for
        self._background.stop(timeout)
        if self._background.done:
            try:
                self._background.take()
            except AveragingError as error:
                log.info("the end of an epoch was given up: %s", error)
            self._replica.publish()
            self._applied = self._replica.tip

    def __repr__(self) -> str:
        return f"shoal.Optimizer(run_id={self.run_id!r}, epoch={self.local_epoch}, optimizer={self.optimizer!r})"


def _show_what_happens() -> None:
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
