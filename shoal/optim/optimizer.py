"""The optimizer that users hold: a torch optimizer whose steps all peers of a run make together."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch

from shoal.cluster.cluster import Cluster
from shoal.cluster.team import Alone, team_of
from shoal.cluster.ties import told_to_all
from shoal.compression import Compression
from shoal.dht.dht import DHT
from shoal.flat import (
    OwnGroups,
    ShowsGroups,
    are_neutral,
    neutral,
    neutral_modes,
    users_modes,
)
from shoal.interrupts import check, held, holding, unbroken, users_handlers
from shoal.membership.holder import Source
from shoal.optim._torch import scale_by_own_rules, set_grad_mode
from shoal.optim.checkpoint import NO_STRANDS, StrandState
from shoal.optim.choice import background_of, make_checkpoint, make_rounds, make_state, make_torch, shards_of, shown_by
from shoal.optim.closures import Closure, loss_of, needs_closure, takes_closure
from shoal.optim.diloco import DiLoCo
from shoal.optim.donors import Donors
from shoal.optim.epoch import Background, Epoch
from shoal.optim.epoch_scheduler import wraps
from shoal.optim.eval_mode import Mode
from shoal.optim.grad_averager import GradientAverager, GradientAveragerFactory
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.lending import Lending
from shoal.optim.machine import Machine
from shoal.optim.pilot import Pilot
from shoal.optim.progress import LocalProgress, Refresh, RunProgress, refresh_of
from shoal.optim.ranks import Ranks
from shoal.optim.reports import Event, ReachabilityReport, fields_of_event
from shoal.optim.run import Run
from shoal.optim.saving import Saving
from shoal.optim.settings import (
    CLUSTER,
    NO_BATCH_SIZE,
    SAMPLES,
    SECONDS,
    AnyOptimizer,
    AnyScheduler,
    Params,
    Settings,
    check_cluster,
    samples_of,
)
from shoal.optim.terms import make_run, name_of_machine
from shoal.optim.trainable import check_writable
from shoal.optim.transfers import Transfers
from shoal.optim.vitals import Vitals
from shoal.optim.work import Batch
from shoal.p2p.identity import PeerID
from shoal.swarm.gates import admit_to
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Tip

if TYPE_CHECKING:
    from shoal.health.metrics import Metrics, MetricsServer

log = logging.getLogger(__name__)

AT_RANK_0 = ("tracker", "local_progress", "optimizer", "opt", "grad_averager", "outer_optimizer", "scheduler")

T = TypeVar("T")

LOOK_SECONDS = 0.1  # more than the reactor takes to look whether an optimizer can be lent


class Optimizer(ShowsGroups):
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
    `target_batch_size` samples, the next `step` of each peer averages the gradients, weighted by samples, makes the
    wrapped optimizer's step with them and steps the scheduler. Then a new *epoch* begins. A peer that starts late, or
    falls out of step, downloads the state from the others in its next `step`, and drops what it has accumulated.

    The parameters and the optimizer's state move into flat memory (`parameter.data` becomes a view of it). Convert the
    model, move it and change its layers before you make the optimizer. You may load values into the model afterwards,
    also with `assign=True`.

    All peers of a run need the same target_batch_size, modes (delay_optimizer_step, delay_grad_averaging,
    delay_state_averaging, average_state_every, use_local_updates, grad_averager_factory, outer), compressions,
    average_opt_statistics, max_grad_norm, min_peers, number of strands, classes of optimizer and scheduler, and
    tensors. If a peer differs, the constructor or the first `step` raises an AveragingError with the name of the option
    or tensor. Each peer chooses every other option for itself. Peers vote on learning rates and the other options of
    the parameter groups, and all peers step with the values that most peers hold. Wrap a scheduler that you step after
    each batch in `shoal.EpochScheduler`.

    All times are in seconds.

    Args:
        dht: a started `shoal.DHT`. The optimizer does not shut it down. In a cluster every rank needs one; with
            `strands=1` only rank 0 does.
        run_id: the name of the run, 1 to 100 characters. Peers with the same run_id train together.
        target_batch_size: the number of samples that all peers together accumulate in an epoch, at least 1. It may be
            None only with `DiLoCo(inner_steps=…)`.
        batch_size_per_step: the number of samples behind the gradients of one `step`. The argument `batch_size` of
            `step` overrides it.
        optimizer: a torch optimizer, or a function that makes one from `params`, which it gets as a list of the same
            form. Several optimizers are one as `shoal.Together`. Its step must not need a closure (as that of LBFGS
            does), except with `use_local_updates` or `outer`, and without a cluster. On the CPU it steps with torch's
            fused kernel if there is one, unless you made it with another kernel (`fused=False`).
        params: parameters, (name, parameter) pairs or groups of either; of real numbers. Give it if, and only if,
            `optimizer` is a function.
        scheduler: a torch scheduler of the wrapped optimizer, or a function that makes one from it. It is stepped once
            per epoch. If other code changes an option that the scheduler sets, the scheduler's value is put back.
        matchmaking_time: the longest time that a round waits for members that have not joined.
        averaging_timeout: how long this peer waits for the result of a round that makes no progress. After that it
            continues with its own gradients. It downloads the state when it finds the others again.
        allreduce_timeout: the time without any progress after which this peer, as coordinator, ends a round for all
            members. `averaging_timeout` when None.
        next_chunk_timeout: the time without a sign of life after which a round continues without a member that holds
            it up. Bytes that arrive slowly are a sign of life. 15 when None.
        load_state_timeout: the time without any progress after which this peer ends a download of the state.
        reuse_grad_buffers: accumulate in `.grad` itself, which saves the memory of a second gradient. `zero_grad` then
            raises a ValueError, and so does a `step` after `model.zero_grad()`. All steps of an epoch have the same
            weight, whatever their batch size. Mixed precision needs `shoal.GradScaler` in this mode.
        offload_optimizer: keep the optimizer's parameters and state on the host, and step there. The device keeps the
            model's parameters and gradients. Needs `params`. As `delay_optimizer_step` when None.
        delay_optimizer_step: make the optimizer's step in the background. The trainer continues with the old
            parameters, and a later `step` sets the new ones, at most one epoch late. Needs `offload_optimizer`. As
            `delay_grad_averaging` when None.
        delay_grad_averaging: average the gradients in the background, too. Needs `delay_optimizer_step`.
        delay_state_averaging: with `use_local_updates`, average the state in the background, and keep the changes that
            the trainer makes meanwhile. If False, `step` waits for the average.
        average_state_every: average the state at the end of every n-th epoch, for this n: the extra tensors always;
            the parameters and the statistics in `average_opt_statistics` with `use_local_updates`, or where peers hold
            different parameters.
        use_local_updates: every `step` steps the wrapped optimizer with this peer's own gradients. At the end of an
            epoch, the peers average the state, weighted by samples. The scheduler is still stepped once per epoch.
        client_mode: this peer does not listen for connections and reduces nothing. As the DHT when None.
        auxiliary: train nothing, and lend bandwidth to the peers that train. Each `step()` waits for a round, at most
            for `matchmaking_time`, and joins it.
        grad_compression: the codec of the gradients in a round; `NoCompression()` when None, as for the two below.
        grad_averager_factory: a function that makes a `shoal.GradientAverager`, which then accumulates and averages the
            gradients. The optimizer calls it with the trained parameters and with `dht`, `prefix`, `start=False`, times
            and more as keywords. It starts the averager when this peer trains.
        state_averaging_compression: the codec of the state in a round.
        load_state_compression: the codec of the state that this peer sends to newcomers. Statistics of the optimizer
            that are not averaged are sent exactly, since no average would make them equal again.
        average_opt_statistics: names of tensors in the optimizer's state that have the shape of their parameter. They
            are averaged with the parameters.
        extra_tensors: tensors that newcomers get beside the parameters and the optimizer's state. Floating-point ones
            are also averaged; integers and complex numbers are not. For a model with BatchNorm give
            `list(model.buffers())`.
        averager_opts: options of the rounds; None stands for an option's default. `bandwidth`: this peer's, in any unit
            that all peers share; measured if nobody gives one. `request_timeout`: how long the coordinator may take to
            answer; 10. `sender_timeout`: the silence after which this peer asks that a member be left out that owes it
            parts; `next_chunk_timeout`. `reducer_timeout`: the same for a member that owes it averages; twice
            `sender_timeout`. `allow_state_sharing`: whether newcomers get this peer's state; True. Three options
            override an argument: `min_matchmaking_time` (`matchmaking_time`), `next_chunk_timeout` and `min_group_size`
            (`min_peers`). Accepted without effect: `target_group_size` (all peers of a run average together, at most
            1024), `part_size_bytes`, `min_vector_size`, `declare_state_period`, `daemon`.
        tracker_opts: the refresh options of `ProgressTracker` and `status_loglevel`.
        performance_ema_alpha: the weight of the newest measurement in the moving average of samples per second, over 0
            and at most 1.
        shutdown_timeout: how long `shutdown` waits.
        verbose: log each event of the run at INFO.
        max_grad_norm: scale the averaged gradient down if its norm over all parameters is larger than this. No limit
            when None.
        min_peers: no epoch ends with fewer training peers. `step` waits for them, at most for `matchmaking_time`, and
            then continues to accumulate. A float from 0.0 (excluded) to 1.0 is a share of the peers that contributed to
            the last epoch. With a share over 0.5, at most one side of a swarm that falls apart continues, and the other
            waits. A newcomer knows of no last epoch.
        membership: this peer's membership in a closed run (`run_id="name@key"`), whose owner admits each peer. Give the
            line that `shoal keys admit` prints, a file with that line, or a function that returns either. A file or a
            function is read again before the membership expires; a function runs in a thread of its own.
        kept_state_dir: a folder for the state that this peer leaves when the run has forked. The last such state is
            there, in a file that `load_kept_state` reads. When None, or if the file can't be written, the state stays
            in memory, if it takes at most a quarter of the free memory.
        outer: train as DiLoCo does, see `shoal.DiLoCo`. Every `step` steps the wrapped (inner) optimizer on the model.
            At the end of an epoch, the peers average their drifts: how far their models have moved. The scheduler is
            stepped once per inner step if `inner_steps` is given, else once per epoch. `max_grad_norm` limits the
            average drift, and `grad_compression` is the codec of drifts. The peers share, compare and download the
            anchor (on the host) and the outer optimizer's state. Each peer keeps the inner optimizer's state for
            itself; with `offload_optimizer` it is on the host.
        error_feedback: add what a lossy `grad_compression` has lost of this peer's gradients (or drifts) in earlier
            rounds, times this factor, to its next ones. Over 0.0 and at most 1.0, which adds all of the loss. It takes
            memory of the gradients' size, and twice that during a round. None adds nothing. Source: Karimireddy et al.
            2019, arXiv 1901.09847.
        cluster: the ranks that together are this peer, see `shoal.Cluster`. All of them make the optimizer with the
            same arguments, and make every call of it, at once. `batch_size` is that of each rank. Needs `params` and an
            `optimizer` function. Each rank steps its strands and keeps their optimizer state. With `strands=1`, rank 0
            steps the whole model and keeps all of the state.
        frozen_parameters: what happens to parameters with requires_grad=False, such as the base model under adapters.
            "sample": each peer has its own, and peers compare 4 KiB of each when they meet; one that differs is refused
            by name. "hash": they compare all of it. "send": newcomers download them with the state. "own": nothing
            compares or sends them. Tensors that are quantized (integers, or classes of their own) are not compared. If
            a cluster has several strands, they are part of the state. Peers need the same choice.
        wait_for_newcomers: the share of the run's time, from 0 to 1, that its rounds may wait for newcomers that still
            download the state: all newcomers together, at most 600 s at once, and 120 s in a young run. 0.0: rounds
            never wait for them. The value of the round's coordinator counts, within what each member would bear.
        max_state_bytes: the largest state that this peer downloads, in bytes of memory. When None, 16 tensors of the
            size of the parameters, the extra tensors, and 64 MiB: enough for all but optimizers that keep whole
            matrices for each parameter (Shampoo's kin). A cluster's rank takes that much for its own strand.
        metrics_port: the port of 127.0.0.1 on which this peer serves its metrics for Prometheus, at `/metrics`. 0 takes
            any free port, see the attribute `metrics_port`. None serves none.

    Attributes:
        dht: as given.
        run_id: as given.
        target_batch_size: as given.
        use_local_updates: as given.
        reuse_grad_buffers: as given.
        auxiliary: as given.
        client_mode: as given; never None.
        batch_size_per_step: as given; you may set it before a step.
        on_event: None, or a function that this optimizer calls with each `EpochReport`, `DownloadReport`, `ForkReport`
            and `ReachabilityReport`. The call is made in the trainer's thread, within `step` and other methods.
        tracker: the run's progress, see `RunProgress`.
        metrics_port: the port in use; None if metrics are not served.
        optimizer: the wrapped optimizer; with `outer`, the inner optimizer.
        outer_optimizer: the optimizer that steps the anchor; None without `outer`.
        scheduler: the scheduler that is stepped with the optimizer, or None.

    Raises:
        ValueError: if an argument makes no sense, alone or together with another.
        TypeError: if `dht` is missing.
        AveragingError: if the run refuses this peer, with the name of the option or tensor that differs.
        OSError: if `metrics_port` is taken.
        ClusterError: if a rank of the cluster is lost, or if another rank raises an error.
    """

    @holding
    @neutral
    def __init__(
        self,
        *,
        dht: DHT | None = None,
        run_id: str,
        target_batch_size: int | None = None,
        batch_size_per_step: int | None = None,
        optimizer: AnyOptimizer,
        params: Params | None = None,
        scheduler: AnyScheduler | None = None,
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
        grad_averager_factory: GradientAveragerFactory | None = None,
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
        min_peers: float = 1,
        membership: Source | None = None,
        kept_state_dir: str | os.PathLike[str] | None = None,
        metrics_port: int | None = None,
        outer: DiLoCo | None = None,
        error_feedback: float | None = None,
        cluster: Cluster | None = None,
        frozen_parameters: str = "sample",
        wait_for_newcomers: float = 0.1,
        max_state_bytes: int | None = None,
    ) -> None:
        if cluster is not None:
            CLUSTER.check("cluster", cluster)
        with told_to_all(None if cluster is None else cluster.group):
            has_run = cluster is None or cluster.strands > 1 or not cluster.rank  # else rank 0 has it for all
            if dht is None and has_run:
                whose = "shoal.Optimizer" if cluster is None else f"shoal.Cluster(strands={cluster.strands})"
                where = " in every rank" if cluster is not None and cluster.strands > 1 else ""
                raise TypeError(f"{whose} needs dht={where}: a shoal.DHT, started")
            mine = dht if has_run else None
            is_client = mine is not None and mine.client_mode
            client_mode = is_client if client_mode is None else client_mode
            if is_client and not client_mode:
                raise ValueError("client_mode=False, but the DHT is in client mode and can't be dialled: leave it out")
            self._settings = settings = Settings.of(locals())
            if cluster is not None:
                check_cluster(cluster, settings, optimizer, params)
            refresh = refresh_of(tracker_opts)
            if verbose:
                _show_what_happens()
            if mine is not None:
                admit_to(lambda: mine.node, run_id, membership)
            extras = list(extra_tensors)
            check_writable(extras, "extra tensor")
        self.dht = cast(DHT, dht)  # None where rank 0 has the run for all
        self.run_id, self.client_mode, self.auxiliary = run_id, client_mode, auxiliary
        self.target_batch_size, self.batch_size_per_step = settings.target_batch_size, settings.batch_size_per_step
        self.use_local_updates, self.reuse_grad_buffers = use_local_updates, reuse_grad_buffers
        self.on_event: Callable[[Event], None] | None = None
        self._epoch: Epoch
        self._run: Run
        self._vitals: Vitals
        self.tracker: RunProgress
        self._ready = self._closed = self._begun = self._begins = False
        self._acts = False  # whether rank 0 acts for all, while the others wait for what it comes to
        self._raised: Exception | None = (
            None  # what `on_event` has raised where all ranks act, until they have the model
        )
        self._metrics: MetricsServer | None = None
        self.metrics_port: int | None = None
        self._trainer = threading.RLock()  # held by the thread that is in a method for the trainer
        self._lending: Lending | None = None
        self._cluster = None if params is None or (cluster and cluster.size == cluster.strands == 1) else cluster
        self._team = Alone() if self._cluster is None else team_of(self._cluster.group)
        self._has_run = self._team.rank == 0
        try:
            self._ranks = Ranks(self._team, shards_of(self._cluster, params), extras)
            with self._team.call("shoal.Optimizer"):
                self._make(optimizer, scheduler, extras, refresh)
                self._tell()
        except BaseException:  # Ctrl-C, too: the other ranks must not wait for an optimizer that was not made
            self._team.leave()
            if self._begins:
                self.shutdown()
            raise
        if self._lending is not None:
            self._lending.belongs_here()

    def _gather_for_step(self) -> None:
        shards = self._ranks.shards
        if self._settings.outer is None or not shards.are_pieces:  # else the model's own gradients are used
            shards.gather_for_step()

    def _make(
        self, optimizer: AnyOptimizer, scheduler: AnyScheduler | None, extras: list[torch.Tensor], refresh: Refresh
    ) -> None:
        """Make what is stepped here, and join the run."""
        settings, shards = self._settings, self._ranks.shards
        made = make_torch(settings, optimizer, scheduler, shards, is_cluster=self._cluster is not None)
        wrapped = made.users.optimizer
        wraps(self, wrapped)
        shown = shown_by(made, shards, settings, lambda: self._epoch.wait())
        super().__init__([dict(group) for group in shown.groups], wrapped.defaults)
        self._needs_closure = needs_closure(type(wrapped))
        scale_by_own_rules(self, self.reuse_grad_buffers)  # so torch's scaler passes itself to `step`, which refuses it
        if not shards.are_here:
            for group in self.param_groups:
                group["params"] = [shards.of[id(each)] for each in group["params"]]
            shown = OwnGroups(self.param_groups, shown.optimizer, elsewhere="rank 0 of the cluster has it")
        self._shown = shown
        self._ready = True
        if not shards.are_here:
            return
        self.optimizer, self.scheduler = wrapped, made.users.scheduler
        self.outer_optimizer = None if settings.outer is None else made.stepped.optimizer
        self._state = state = make_state(made, extras, settings, shards, self.dht)
        placement = state.of_model.placement
        placement.shown = shown
        placement.refuse_ranks(self._team.size)  # before any parameter is sent
        if placement.unshared and not self.auxiliary:
            layers = ", ".join(f"{count} {kind}" for kind, count in placement.unshared.items())
            log.warning(
                "%s of the model keep running statistics that are not in extra_tensors: each peer goes on with its "
                "own, and a newcomer begins without any; give extra_tensors=list(model.buffers())",
                layers,
            )
        self._rounds = rounds = make_rounds(self, settings, state, made, shards, self.dht)
        background = background_of(settings, is_cluster=self._cluster is not None)
        pilot = self._team.at_first(lambda: self._make_pilot(refresh, background))
        relayed = tuple if state.is_divided else self._run.relayed
        self._donors = Donors(self.dht, self.run_id, len(state.division.carriers), state.max_nbytes, relayed)
        team = self._ranks.of_state
        transfers = Transfers(settings, team, state, rounds.work, pilot, self._donors)
        self._epoch = epoch = Epoch(settings, team, state, rounds, pilot, transfers, background)
        self._team.at_first(lambda: self._make_vitals(pilot))
        checkpoint = make_checkpoint(state, rounds.work, shards)
        self._saving = Saving(self, team, epoch, state, rounds, checkpoint)
        self._team.when_lost(self._stop)
        try:
            transfers.serve(lambda: epoch.is_behind)  # before newcomers meet this peer
            self._team.at_first(lambda: self._run.start())
        except BaseException:  # Ctrl-C, too: a peer that was not made serves neither metrics nor a state
            self._close_metrics()
            self._donors.stop()
            raise
        self._begins = True  # from now on the others must not count an optimizer that is not made
        self._team.at_first(lambda: self.tracker.start())
        self._team.at_first(lambda: self._vitals.start())
        self._epoch.begin()
        check()

    def _make_pilot(self, refresh: Refresh, background: Background) -> Pilot:
        settings, state, rounds = self._settings, self._state, self._rounds
        self._run = run = make_run(settings, self.dht, state, rounds)
        self.tracker = RunProgress(
            run,
            settings.target,
            refresh,
            alpha=settings.performance_ema_alpha,
            may_wait=not (background.averages or background.steps or settings.counts_steps),
        )
        machine = Machine(run.me, name_of_machine(rounds, state.optimizer))
        return Pilot(settings, run, self.tracker, machine, type(state.wrapped).__qualname__, self._tell_event)

    def _make_vitals(self, pilot: Pilot) -> None:
        settings, work = self._settings, self._rounds.work
        counts_steps = work.steps_per_epoch is not None
        if not self.auxiliary:
            of_ranks = "" if self._cluster is None else "cluster="
            because = of_ranks or ("reuse_grad_buffers=True" if settings.reuse_grad_buffers else "")
            self._lending = Lending(self._epoch, self._run, self._trainer, because=because, counts_steps=counts_steps)
        compares = work.shares_state and not self.auxiliary
        self._vitals = Vitals(pilot, self._epoch, compares=compares, counts_steps=counts_steps)
        if settings.metrics_port is not None:
            from shoal.health.metrics import MetricsServer  # it imports an HTTP server

            self._metrics = MetricsServer(settings.metrics_port, self._collect)
            self.metrics_port = self._metrics.port

    def _stop(self) -> None:
        """A rank is lost: nobody waits any longer."""
        self._rounds.stop()
        self._donors.stop()
        self._team.at_first(lambda: self._run.stop(self._settings.shutdown_timeout))

    def _together(self, call: str, act: Callable[[], T], collect: Callable[[], object] | None = None) -> T:
        """Do `act` as a call of all ranks.

        Args:
            call: the name of the call.
            act: what ranks with a part of the state do.
            collect: gathers something from the model before.
        """
        if self._acts:  # in a callback of the user, in an outer call that tells the others
            return act()
        with self._team.call(call):
            if self._closed or self._cluster is None:
                return self._ranks.act(act)
            self._ranks.reach()
            if collect is not None:
                self._ranks.gather(collect)
            result = self._act(act)
            told = self._tell(value=result is True)
            return result if self._ranks.have_state else cast(T, told)

    def _act(self, act: Callable[[], T]) -> T:
        """Do `act` at all ranks that have a part of the state. If rank 0 does it alone, the others get what it has come
        to, also if it raises an error then."""
        if self._ranks.shards.are_everywhere or not self._has_run:
            return self._ranks.act(act)
        self._acts = True
        try:
            return act()
        except BaseException:
            self._tell()
            raise
        finally:
            self._acts = False

    def _tell(self, *, moves: bool = False, value: bool = False) -> bool:
        """Share with the other ranks what rank 0 has come to. Returns its `value`. Raises what `on_event` has raised
        meanwhile."""
        if self._cluster is None:
            return value
        value = self._ranks.tell(lambda: self._epoch.applied, self.param_groups, moves=moves, value=value)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return value

    # -- training

    @property
    def local_epoch(self) -> int:
        """The number of epochs that the model's parameters have behind them. While the background computes the end of
        an epoch, the optimizer's own copy of the parameters may be one epoch ahead."""
        return self._applied.epoch

    @property
    def _applied(self) -> Tip:
        """The tip of the model's parameters."""
        return self._epoch.applied if self._ranks.have_state else self._ranks.tip

    @property
    def local_progress(self) -> LocalProgress:
        """This peer's own samples in this epoch, and its speed."""
        return self.tracker.local_progress

    def is_synchronized_with_peers(self) -> bool:
        """Whether this peer is at the newest epoch that it has heard of, or one before it. Only rank 0 of a cluster
        hears of the other peers; at other ranks, this is `is_alive`."""
        if not self._has_run:
            return self.is_alive()
        return self.local_epoch >= self.tracker.global_epoch - 1

    def is_alive(self) -> bool:
        """Whether this peer is in the run: nobody has shut down the optimizer or its DHT, and no rank of its cluster is
        lost."""
        is_reached = not self._ranks.have_state or self.dht.is_alive()
        return not self._closed and is_reached and self._team.is_alive

    def report(self, *, loss: float | torch.Tensor) -> None:
        """Report the loss of a batch, which `shoal top`, `shoal monitor` and `metrics_port` show. Every 10 s this peer
        publishes the mean of the losses reported since. They have no effect on training.

        Args:
            loss: a number, or a tensor with one element; a tensor on a device makes this call wait for the device.
        """
        self._team.at_first(lambda: self._vitals.report(float(loss.item() if isinstance(loss, torch.Tensor) else loss)))

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> torch.Tensor | None:
        """Add the gradients in `.grad` to this epoch, and end the epoch if the peers have enough samples.

        If no parameter has a gradient, the samples do not count, and one WARNING says so. If the background has raised
        an error since the last call, this call raises it.

        Args:
            closure: a function that computes the loss and the gradients. `step` calls it first, with gradients enabled.
                At the end of the epoch, the wrapped optimizer's closure returns the run's loss: the mean over all
                samples, the same at all peers; it gets None if a peer gave none. With `use_local_updates` or `outer`,
                the wrapped optimizer gets this closure itself, and may call it several times; but in a cluster, and
                with `grad_scaler`, one that returns the loss of this step.
            batch_size: the number of samples over which `.grad` is the mean; `batch_size_per_step` when None. With 0,
                `step` ignores `.grad`, and this peer joins the round if one is due.
            grad_scaler: the scaler of the loss. `step` unscales the gradients, and drops them if they overflowed. Not
                with a cluster.

        Returns:
            What the closure returns; None without a closure. If the wrapped optimizer has called the closure itself,
            what its step returns.

        Raises:
            AveragingError: if the run refuses this peer, with the name of the option that differs. Other errors of the
                network are logged, and this peer continues.
            ValueError: for arguments that make no sense; if the model's parameters were replaced, converted or moved
                since the optimizer was made; if a wrapper for several ranks holds them; or if gradients that are
                accumulated in `.grad` were cleared.
            ClosureCalledAgain: a RuntimeError, if the wrapped optimizer wants to call its closure again and can't.
                Parameters and state are as before that step; in inner steps only if it was the first.
            RuntimeError: if another thread is in this optimizer, or after a `shutdown` of it or of its DHT; with
                `outer`, if a checkpoint was loaded into the model alone, after the first inner step.
            ClusterError: in a cluster, if a rank is lost, has raised an error, or lacks a step after one.
        """
        with self._in_trainer("step", grad=False):
            if self._closed:
                raise RuntimeError("this optimizer was shut down")
            if self._lending is not None:
                self._lending.belongs_here()
            if self._cluster is not None:
                return self._step_of_ranks(closure, batch_size, grad_scaler)
            self._look()
            if self.auxiliary:
                if closure is not None or batch_size is not None or grad_scaler is not None:
                    raise ValueError("auxiliary=True trains nothing: call step() without arguments")
                self._epoch.assist()
                return None
            if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
                raise ValueError(f"grad_scaler= is a {type(grad_scaler).__name__}: give a shoal.GradScaler")
            batch_size = self.batch_size_per_step if batch_size is None else batch_size
            if batch_size is None:
                raise ValueError(NO_BATCH_SIZE)
            if not (type(batch_size) is int and batch_size >= 0):
                batch_size = SAMPLES.check("batch_size", batch_size)
            return self._step(Batch(batch_size, grad_scaler, closure=None if closure is None else Closure(closure)))

    def _step_of_ranks(self, closure: Any, batch_size: int | None, grad_scaler: object) -> torch.Tensor | None:
        """A step of all ranks. Each evaluates its closure before it waits for the others, whose closures take as
        long."""
        ranks, given = self._ranks, None if closure is None else Closure(closure)
        if self._acts and batch_size == 0 and given is None:  # in a callback, in an outer call that tells the others
            return self._step(Batch.of_ranks(0, None))
        with self._team.call("step"):
            self._team.at_first(self._look)
            if self._shown is not None and not ranks.have_state:
                self._shown.check()  # where there is a state, `Work.add` does
            samples = samples_of(self.batch_size_per_step if batch_size is None else batch_size, grad_scaler)
            if given is not None:
                given.evaluate()
            if ranks.shards.gathers_alone:  # nothing can fail at another rank meanwhile
                self._gather_for_step()
            tip = self._state.tip if ranks.shards.are_everywhere else None
            step = ranks.bring(samples, None if given is None else loss_of(given.returned), tip)
            ranks.gather(self._gather_for_step)
            self._act(lambda: self._step(Batch.of_ranks(step.samples, step.loss)))
            self._tell(moves=self._settings.moves_within_epochs and not ranks.shards.are_everywhere)
        return None if given is None else given.returned

    def _look(self) -> None:
        """Check the DHT, and tell the user which members this peer reaches, if that has changed since the last step."""
        self._check_dht()
        reports = self._run.swarm.contacts.reports  # one for each change of the members that this peer reaches
        while reports:
            found = reports.popleft()
            self._give(ReachabilityReport(found.num_peers, tuple(map(str, found.unreached)), found.advice))

    def _step(self, batch: Batch) -> torch.Tensor | None:
        work, state, closure = self._rounds.work, self._state, batch.closure
        work.refuse_load()
        if state.is_in_eval:
            raise RuntimeError("the optimizer is in eval(): call train() of it before the batches that it trains on")
        if not self._begun:  # by now, frameworks have wrapped and changed the model
            state.of_model.placement.refuse_ranks(self._team.size)
            self._epoch.take_over()
            self._begun = True
        if work.shares_state:
            state.options.look(self._epoch.applied.epoch)
        calls_it = work.steps_at_once and batch.samples
        if self._needs_closure and closure is None and calls_it:
            raise ValueError(f"the step of a {type(self.optimizer).__name__} calls its closure: call step(closure)")
        self._epoch.take_result(wait=False)
        if closure is None:
            self._epoch.advance(batch)
            return None
        if batch.scaler is not None and batch.scaler.is_enabled():
            calls_it = False  # the scaler unscales the gradients, and looks at them, before the step
        if not closure.is_evaluated and not (calls_it and takes_closure(type(self.optimizer))):
            closure.evaluate()
        self._epoch.advance(batch)
        result: torch.Tensor | None = closure.result()
        return result

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, if the wrapped optimizer has them: see the guide "Schedule-free optimizers"."""
        modes: dict[str, Mode] = {"train": "train", "eval": "eval"}
        if name in modes and "_state" in self.__dict__ and callable(getattr(self._state.wrapped, name, None)):
            return functools.partial(self._to_mode, modes[name])
        if name in AT_RANK_0 and not self.__dict__.get("_has_run", True):
            raise AttributeError(f"{name} is at rank 0 of the cluster only, which is the peer of the run")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _to_mode(self, mode: Mode, is_on: bool = True) -> None:
        mode = mode if is_on else "eval"  # as `train(False)` of modules
        if mode == "train" and self._state.is_in_train:
            return  # frameworks call it before each batch: nothing needs to settle
        with self._in_trainer(mode):
            if self._cluster is not None:
                raise ValueError(f"{mode}() of an optimizer is not for a cluster: its ranks have no such call")
            self._epoch.to_mode(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `.grad`, as torch does. The gradients that `step` has accumulated stay.

        Args:
            set_to_none: set each `.grad` to None; if False, to zeros.

        Raises:
            ValueError: with `reuse_grad_buffers`, which accumulates in `.grad`.
        """
        if self.reuse_grad_buffers:
            raise ValueError("reuse_grad_buffers=True accumulates in .grad: do not call zero_grad, which would lose it")
        self._ranks.shards.clear(set_to_none)
        super().zero_grad(set_to_none)

    # -- the state

    def settle(self) -> None:
        """Wait for what is under way in the background (a round, a step), and apply it. From then until the next
        `step`, the model and `state_dict` are of the same epoch. Call it before you save the model and the state in
        different statements, and before you write into the model. Something is under way in the modes with delays, and
        where a script trains several models.

        In a cluster all ranks make this call at once.

        Raises:
            AveragingError: as `step`, if the background has raised an error since the last call.
            RuntimeError: with `outer`, if a checkpoint was loaded into the model alone while a round was under way.
        """
        with self._in_trainer("settle"):
            if self._calls_all:  # else not all ranks are here
                self._together("settle", lambda: self._epoch.settle())

    def load_state_from_peers(self, *, timeout: float | None = None) -> bool:
        """Download the state that most peers hold, and continue from it.

        Args:
            timeout: the time in seconds without any progress after which the download ends; `load_state_timeout` when
                None.

        Returns:
            Whether this peer took over a state. It did not if there was nobody to ask, or if the peers' state has fewer
            samples behind it than this peer's.

        Raises:
            AveragingError: if no peer could send the state, with the reason of each, or if there is no memory for it.
                Then nothing has changed.
            ValueError: for a `timeout` that makes no sense.
        """
        timeout = self._settings.load_state_timeout if timeout is None else timeout

        def load() -> bool:
            self._team.at_first(self._check_dht)
            with self._epoch.in_train_mode():
                return self._epoch.load_state(SECONDS.check("timeout", timeout))

        with self._in_trainer("load_state_from_peers"):
            if self._closed:
                raise AveragingError("the run was left")
            return self._together("load_state_from_peers", load)

    @property
    def tip(self) -> str:
        """The name of the state that the model's parameters are, as `<epoch>:<samples behind it>:<lineage, 64 hex
        digits>`. Peers with the same tip have the same state. `shoal keys pin` takes a tip."""
        return str(self._applied)

    def load_kept_state(self, path: str | os.PathLike[str] | None = None) -> None:
        """Continue from a state that a peer left when the run forked, and kept in `kept_state_dir` or in memory. If
        other peers hold a state that outranks it, the next `step` downloads that one, unless the owner has pinned this
        one.

        Args:
            path: the file. None is the state that this peer has kept in its memory.

        Raises:
            OSError: if there is no such file.
            ValueError: if there is no such state in the file or in memory, if the state does not fit this model, or if
                ranks carry strands. Then nothing has changed.
            AveragingError: if there is no memory to load it. Then nothing has changed.
        """

        def load() -> None:
            self._check_dht()
            if self._state.is_divided:
                raise ValueError("load_kept_state: a cluster whose ranks carry strands keeps no states, and loads none")
            with self._epoch.in_train_mode():
                self._epoch.load_kept(path)

        with self._in_trainer("load_kept_state"):
            if self._closed and not self._ranks.have_state:
                raise ValueError("load_kept_state: this rank has no state, and the run was left")
            self._together("load_kept_state", load)

    def state_dict(self) -> dict[str, Any]:
        """The state of this peer's training, as plain data and tensors.

        It is the wrapped optimizer's state dict with the epoch (`["state"]["local_epoch"]`), the run's lineage, the
        scheduler's state, and what an averager of `grad_averager_factory` carries from epoch to epoch. This call waits
        for a step in the background and applies it, so that the dict belongs to the model's parameters. The dict has no
        gradients of an epoch that has not ended.

        In a cluster, rank 0 returns the state. If ranks carry strands, or in a mode in which rounds or steps run in the
        background, all ranks make this call at once.

        In the modes without delays, a run of several peers continues from these dicts bit for bit, if each peer keeps
        its identity (`DHT(identity_path=…)`): gradients are summed in the order of the peers' keys. With other
        identities it continues to rounding.

        This method and `load_state_dict` call the hooks that you have registered for them on this optimizer, as torch's
        do. Within these, hooks of the wrapped optimizer are called, with its own state dict. In a cluster, the hooks of
        rank 0 are called. Downloads, kept states and what newcomers get call none.
        """

        def save() -> dict[str, Any]:
            return self._saving.state_dict()

        with self._in_trainer("state_dict"):
            # Otherwise the other ranks need not be there.
            found = self._together("state_dict", save) if self._calls_all else self._ranks.act(save)
            return found if self._has_run else {"state": {"local_epoch": self.local_epoch}, "param_groups": []}

    @property
    def _calls_all(self) -> bool:
        """Whether all ranks make a call in which rank 0 may have to wait for the others, or for the background."""
        return self._settings.in_background or self._ranks.shards.are_everywhere

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict. Load the model's parameters first.

        After `shutdown`, this sets the wrapped optimizer's state and the epoch, and no run hears of it.

        Args:
            state_dict: from this class, or from the wrapped optimizer; with the latter, the epoch stays. It is copied.
                If it has no averager's state, the averager of `grad_averager_factory` begins as in a new run.

        Raises:
            ValueError: if the dict has other parameter groups, or the state of another averager.
        """

        def load() -> None:
            if not self._closed:
                self._team.at_first(self._check_dht)
            self._saving.load_state_dict(state_dict)

        with self._in_trainer("load_state_dict"):
            ranks, shards = self._ranks, self._ranks.shards
            ranks.forget()
            self._together("load_state_dict", load, None if shards.are_pieces else shards.gather_parameters)
            if self._closed and not ranks.have_state:  # nobody tells it the epoch any more
                epoch = state_dict.get("state", {}).get("local_epoch", ranks.tip.epoch)
                ranks.tip = Tip(epoch, bytes(32), 0.0)

    def strand_state(self) -> StrandState:
        """The state for `torch.distributed.checkpoint`. Each rank of a cluster saves and loads its own strands.

        >>> state = {"model": get_model_state_dict(model), "optimizer": optimizer.strand_state()}
        >>> dcp.save(state, checkpoint_id=path)
        >>> dcp.load(state, checkpoint_id=path)

        All ranks make these calls at once. Any cluster with the same number of strands loads the checkpoint, whatever
        its number of ranks. With another number of strands, torch raises an error, and nothing has changed. Everything
        else is as in `state_dict`. With `outer`, load the model's parameters in the same call, or before. Each rank
        calls the hooks of its own optimizer, with its own part of the state.

        Raises:
            ValueError: if this optimizer has no strands.
        """
        if not self._ranks.shards.are_pieces:
            raise ValueError(NO_STRANDS)

        def give() -> dict[str, Any]:
            with self._in_trainer("strand_state().state_dict"):
                return self._together("strand_state().state_dict", self._saving.own_part)

        def take(state: dict[str, Any]) -> None:
            def load() -> None:
                if not self._closed:
                    self._team.at_first(self._check_dht)
                self._saving.load_own_part(state)

            with self._in_trainer("strand_state().load_state_dict"):
                self._together("strand_state().load_state_dict", load)

        return StrandState(give, take)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: all peers must have the same parameters from the beginning.

        Raises:
            ValueError: always.
        """
        if self._ready:
            raise ValueError("the parameters of a run are fixed: give all groups when making the optimizer")
        super().add_param_group(param_group)

    # -- names of hivemind, whose optimizer has two averagers and schedules a round for each

    scheduled_grads = scheduled_state = None

    @property
    def opt(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self.optimizer

    @property
    def state_averager(self) -> Optimizer:
        """This optimizer: it averages the state, has the epoch and serves newcomers."""
        return self

    @property
    def grad_averager(self) -> Optimizer | GradientAverager | None:
        """What averages gradients: the averager of `grad_averager_factory`, or this optimizer; None with local
        updates."""
        if self.use_local_updates:
            return None
        return self._rounds.averager or self

    # -- the rest

    def _in_trainer(self, method: str, *, grad: bool | None = None) -> _InTrainer:
        """Within, no other thread may call a method that is for the trainer, torch is in none of the user's modes, and
        signal handlers are held.

        Args:
            grad: the grad mode; None: as it is.

        Raises:
            RuntimeError: if another thread is in one.
        """
        return _InTrainer(self._trainer, self._wait_for_loan, method, grad)

    def _wait_for_loan(self) -> bool:
        """Acquire the lock, if it is held by the thread of this optimizer, which closes an epoch on loan, or by the
        reactor, which looks whether it is free."""
        if self._lending is None:
            return False
        return self._trainer.acquire(timeout=-1 if self._lending.is_at_work else LOOK_SECONDS)

    def _check_dht(self) -> None:
        if self.dht is not None and not self.dht.is_alive():
            raise RuntimeError(
                "the DHT of this optimizer was shut down: shut the optimizer down first, and the DHT after it; to go "
                "on training, make a new DHT and a new optimizer"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a shoal.Optimizer is neither copied nor pickled, for it is a peer of the run: save "
            "optimizer.state_dict(), and load it into a new optimizer"
        )

    def _collect(self) -> Metrics:
        """This peer's present metrics; none if it has left the run."""
        from shoal.health.metrics import families

        try:
            health = self._run.call(self._vitals.health)
        except AveragingError:
            return []
        return families(self.run_id, [(PeerID(self._run.me), health)])

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _tell_event(self, event: Event) -> None:
        self._vitals.heard(event)
        log.info("%s", event, extra=fields_of_event(event))
        self._give(event)

    def _give(self, event: Event) -> None:
        """Give an event to the user."""
        if self.on_event is None:
            return
        with users_handlers(), users_modes():
            if self._cluster is None or not self._ranks.shards.are_everywhere:
                self.on_event(event)
                return
            try:
                self.on_event(event)
            except Exception as error:  # noqa: BLE001 (it is raised at the end of the call, when all ranks are there)
                self._raised = error

    @holding
    def finish(self) -> None:
        """Leave the run at the end of training, when all peers end at the same epoch.

        If all left at once, a peer that has missed the last rounds would find nobody to download from, and would make
        the last epochs alone. So this peer stays until no connected peer is behind its epoch. Meanwhile it serves its
        state and begins no round. It leaves at once if nobody is behind, and as soon as the run continues without it.
        It stays at most `averaging_timeout` after the last time that another peer caught up, left or asked for the
        state, and at most `load_state_timeout` in all.

        This call waits for a round in the background. If the background has raised an error since the last call, this
        call raises it after it has left the run. Everything else is as in `shutdown`.
        """
        try:
            with self._in_trainer("finish"):
                if self.is_alive() and not self.auxiliary:
                    self._finish()
        except AveragingError as error:
            if not self._run.is_over:
                raise
            log.info("%s", error)  # another thread has shut it, or the DHT, down
        finally:
            self.shutdown()

    def _finish(self) -> None:
        """Take the last result, and stay for the peers that are behind. They download what all ranks have, or rank 0
        alone, for which the others don't wait."""
        serve_together = self._ranks.shards.are_everywhere

        def end() -> None:
            self._epoch.end()
            if serve_together:
                self._team.at_first(self._stay)

        self._together("finish", end)
        self._team.leave()
        if not serve_together:
            self._team.at_first(self._stay)

    def _stay(self) -> None:
        timeouts = self._settings.averaging_timeout, self._settings.load_state_timeout
        self._run.wait_for_those_behind(*timeouts, lambda: self._donors.asked_at)

    @holding
    @neutral
    def shutdown(self) -> None:
        """Leave the run now. The parameters and the DHT stay usable. A round in the background ends without a result.
        A step in the background is applied when it is done; this call waits for it, at most for `shutdown_timeout`.
        A second call does nothing. A signal, such as Ctrl-C, that arrives meanwhile is handled when this call ends."""
        if self._closed:
            return
        self._closed = True
        with unbroken():
            timeout = self._settings.shutdown_timeout
            self._team.leave()
            if not self._begins:
                return
            self._team.at_first(lambda: self._leave_run(timeout))
            self._donors.stop(timeout)
            self._epoch.close(timeout)

    def _leave_run(self, timeout: float) -> None:
        if self._lending is not None:
            self._lending.close()
        self._close_metrics()
        if self.dht is not None and self.dht.is_alive():
            self.tracker.stop()
            self._vitals.stop()
        if not self._run.stop(timeout):
            log.warning("leaving the run took longer than %g s", timeout)

    def __repr__(self) -> str:
        rank = "" if self._cluster is None else f"{self._team.me}, "
        wrapped = f", optimizer={self.optimizer!r}" if self._ranks.have_state else ""
        return f"shoal.Optimizer({rank}run_id={self.run_id!r}, epoch={self.local_epoch}{wrapped})"


class _InTrainer:
    """See `Optimizer._in_trainer`. Of a step, context managers made of functions would take 10 %."""

    __slots__ = ("_grad", "_held", "_lock", "_method", "_modes", "_wait_for_loan", "_was_grad")

    def __init__(
        self, lock: threading.RLock, wait_for_loan: Callable[[], bool], method: str, grad: bool | None
    ) -> None:
        self._lock, self._wait_for_loan, self._method, self._grad = lock, wait_for_loan, method, grad
        self._modes: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._held = held()
        self._held.__enter__()
        if not (self._lock.acquire(blocking=False) or self._wait_for_loan()):
            error = RuntimeError(
                f"{self._method}() was called while another thread is in this optimizer: one thread trains"
            )
            self._held.__exit__(None, None, None)
            raise error
        self._was_grad = torch.is_grad_enabled()
        if not are_neutral():
            self._modes = neutral_modes()
            self._modes.__enter__()
        if self._grad is not None:
            set_grad_mode(self._grad)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._modes is not None:
            self._modes.__exit__(kind, error, traceback)
        if self._grad is not None:
            set_grad_mode(self._was_grad)
        self._lock.release()
        self._held.__exit__(kind, error, traceback)


def _show_what_happens() -> None:
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
