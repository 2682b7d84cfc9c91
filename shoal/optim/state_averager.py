"""Parameters, optimizer statistics and buffers that peers average now and then, beside training on their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Gathered, StepControl
from shoal.dht.dht import DHT
from shoal.optim import options
from shoal.optim.guarded_state import GuardedState
from shoal.optim.local_state import LocalState
from shoal.optim.settings import check_names
from shoal.optim.state_update import StateUpdate
from shoal.p2p.errors import Refused
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, Snapshot, encoded

log = logging.getLogger(__name__)

LOAD_TIMEOUT = 60.0


class TrainingStateAverager(DecentralizedAverager):
    """Steps an optimizer with this peer's gradients, and averages parameters, statistics and buffers with peers.

    >>> averager = shoal.TrainingStateAverager(
    ...     dht=dht, prefix="experiment", start=True, params=model.parameters(),
    ...     optimizer=lambda params: torch.optim.Adam(params), average_opt_statistics=["exp_avg_sq"],
    ... )
    >>> for number, batch in enumerate(data):
    ...     loss(model, batch).backward()
    ...     averager.step(optimizer_step=True, zero_grad=True, averaging_round=number % 100 == 0)

    Args:
        dht: see `DecentralizedAverager`.
        optimizer, params, scheduler: as of `shoal.Optimizer`; the scheduler follows `local_epoch`.
        initialize_optimizer: have the optimizer make its statistics now, by a step with gradients of zero, which leaves
            the parameters as they are; None: if it has none yet.
        offload_optimizer: make the optimizer over parameters of its own on the host; `step` sets the model's to them.
        custom_gradients: with that, the user gives the optimizer's parameters their gradients.
        reuse_tensors: average the optimizer's tensors themselves, without copies; then the optimizer does not step
            while a round runs. By default where `offload_optimizer` is, and not `delta_rule_averaging`.
        delta_rule_averaging: what changes while a round runs in the background is kept: tensors become their average
            plus the change. Then they are not the same bits on all peers.
        sync_epoch_when_averaging: after a round, go on at the highest epoch of the group.
        parameter_names: of the parameters, in their order, for a `compression` that chooses by them.
        average_opt_statistics: names of the optimizer's statistics that are averaged.
        extra_tensors: averaged, too, and shared with newcomers.
        status_loglevel: of what is logged about rounds.
        performance_ema_alpha: accepted and without effect: nothing here is foretold.
        kwargs: of `DecentralizedAverager`, among them `prefix` and `start`.

    Attributes:
        local_epoch: may be set.
        optimizer, scheduler, main_parameters, extra_tensors: what is trained; the last are the model's parameters.
        opt_keys_for_averaging: as `average_opt_statistics`.

    Raises ValueError for arguments that do not go together, and as `DecentralizedAverager`.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        optimizer: torch.optim.Optimizer | options.OptimizerFactory,
        params: options.Params | None = None,
        scheduler: LRScheduler | options.SchedulerFactory | None = None,
        initialize_optimizer: bool | None = None,
        offload_optimizer: bool = False,
        custom_gradients: bool = False,
        reuse_tensors: bool | None = None,
        delta_rule_averaging: bool = False,
        performance_ema_alpha: float = 0.1,
        sync_epoch_when_averaging: bool = False,
        parameter_names: Sequence[str] | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        status_loglevel: int = logging.DEBUG,
        **kwargs: Any,
    ) -> None:
        check_names(average_opt_statistics)
        if custom_gradients and not offload_optimizer:
            raise ValueError("custom_gradients=True is for an optimizer with parameters of its own: offload_optimizer")
        if reuse_tensors is None:
            reuse_tensors = offload_optimizer and not delta_rule_averaging
        if reuse_tensors and delta_rule_averaging:
            raise ValueError("delta_rule_averaging=True needs copies of what it averages: leave reuse_tensors out")
        self.offload_optimizer, self.custom_gradients = offload_optimizer, custom_gradients
        self.reuse_tensors, self.delta_rule_averaging = reuse_tensors, delta_rule_averaging
        self.sync_epoch_when_averaging, self.status_loglevel = sync_epoch_when_averaging, status_loglevel
        self.opt_keys_for_averaging, self.extra_tensors = tuple(average_opt_statistics), list(extra_tensors)
        self._local = LocalState(
            optimizer,
            params,
            scheduler,
            offload=offload_optimizer,
            initialize=initialize_optimizer,
            reuse=reuse_tensors,
            statistics=self.opt_keys_for_averaging,
            extra_tensors=self.extra_tensors,
            names=parameter_names,
        )
        self.optimizer, self.scheduler = self._local.optimizer, self._local.scheduler
        self.main_parameters = self._local.main_parameters
        self.local_epoch = 0
        self._guarded = GuardedState(self._local, self)
        self.lock_optimizer = self._guarded.lock  # held while its tensors change
        self._updates: list[StateUpdate] = []  # under way or not applied yet, in their order
        self._background = ThreadPoolExecutor(1, thread_name_prefix="shoal-state")
        kwargs.setdefault("tensor_infos", self._local.infos)
        super().__init__(self._local.averaged, dht, **kwargs)

    # -- steps

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now, for the round of a later `step(averaging_control=…)`.

        Args:
            scheduled_time: when that will be, in seconds of `get_dht_time()`.
            kwargs: of `DecentralizedAverager.step`.
        """
        given = {"gather": self.local_epoch, **kwargs}
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **given)
        assert isinstance(control, StepControl)
        return control

    def step(  # type: ignore[override]
        self,
        wait_for_delayed_updates: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        delay_optimizer_step: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        averaging_control: StepControl | None = None,
        wait_for_trigger: Callable[[], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        set_to_none: bool = True,
        averaging_opts: Mapping[str, Any] | None = None,
    ) -> Gathered | None:
        """Do what is asked for, in this order.

        Args:
            wait_for_delayed_updates: wait for what runs in the background. By default before a round and, without the
                delta rule, before the optimizer's step, whose result the background's would overwrite.
            apply_delayed_updates: set the tensors to what the background has finished.
            increment_epoch: add 1 to `local_epoch`; the scheduler follows, after the optimizer's step if there is one.
            optimizer_step: step the optimizer.
            zero_grad: clear the gradients.
            delay_optimizer_step: do so in the background, and apply the result in a later call; needs
                `offload_optimizer`.
            averaging_round: average with peers. A round that fails is logged, and changes nothing.
            delay_averaging: go on meanwhile, and apply the result in a later call; by default as the optimizer's step.
            averaging_control: the round that was scheduled for this by `schedule_step`.
            wait_for_trigger: called before the optimizer's step, where the step is made; with `reuse_tensors` or
                `custom_gradients`. If it raises, nothing is stepped or averaged.
            grad_scaler: by which the optimizer is stepped.
            set_to_none: how gradients are cleared.
            averaging_opts: of `DecentralizedAverager.step`: weight, timeout and so on.

        Returns what the group of a round gathered (the epochs of its members) if one was finished in this call, else
        None.
        Raises ValueError for arguments that do not go together, and what an earlier step in the background has raised.
        """
        if delay_averaging is None:
            delay_averaging = delay_optimizer_step
        acts = optimizer_step or zero_grad or averaging_round
        if wait_for_delayed_updates is None:
            overlaps = self.delta_rule_averaging and not self._is_stepping
            wait_for_delayed_updates = averaging_round or (optimizer_step and not overlaps)
        if averaging_round and not (wait_for_delayed_updates and apply_delayed_updates):
            raise ValueError(
                "averaging_round=True waits for the round before and applies its result: leave "
                "wait_for_delayed_updates and apply_delayed_updates out"
            )
        if delay_optimizer_step:
            self._check_delay(averaging_round, delay_averaging)
        if averaging_control is not None and not averaging_round:
            raise ValueError("averaging_control= is for a round: averaging_round=True")
        if wait_for_trigger is not None:
            self._check_trigger(acts)
        gathered = self._settle(wait_for_delayed_updates, apply_delayed_updates)
        self.local_epoch += increment_epoch
        if not acts:
            self._follow_epoch()
            return gathered

        update = StateUpdate()
        if averaging_round:
            update.round = self._open_round(averaging_control, averaging_opts or {})
        if self.offload_optimizer and not self.custom_gradients and (optimizer_step or zero_grad):
            self._local.load_gradients()

        def work() -> None:
            try:
                if wait_for_trigger is not None:
                    wait_for_trigger()
                with self.lock_optimizer:
                    if optimizer_step:
                        self._guarded.step(grad_scaler)
                    if zero_grad:
                        self._local.zero_grad(set_to_none)
                    self._local.update_scheduler(self.local_epoch)
                if update.round is not None:
                    update.before = self._guarded.take(keep=self.delta_rule_averaging)
                    update.round.allow_allreduce()
            except BaseException:  # whatever the user's optimizer raised: the others must not wait for this peer
                update.cancel()
                raise

        if delay_optimizer_step:
            self._updates.append(update)
            update.work = self._background.submit(work)
            return gathered
        work()
        if averaging_round and delay_averaging:
            self._updates.append(update)
            self._publish(update)
            return gathered
        update.wait()
        return self._apply(update) or gathered

    def _check_delay(self, averaging_round: bool, delay_averaging: bool) -> None:
        if not self.offload_optimizer:
            raise ValueError("delay_optimizer_step=True needs an optimizer with parameters of its own: "
                             "offload_optimizer=True")  # fmt: skip
        if averaging_round and not delay_averaging:
            raise ValueError("a round after a delayed optimizer step is delayed, too: leave delay_averaging=False out")

    def _check_trigger(self, acts: bool) -> None:
        if not acts:
            raise ValueError("wait_for_trigger= comes before a step or a round, and none was asked for")
        if not (self.reuse_tensors or self.custom_gradients):
            raise ValueError(
                "wait_for_trigger= leaves open of which gradients the step is: it needs reuse_tensors=True or "
                "custom_gradients=True"
            )

    def _open_round(self, control: StepControl | None, given: Mapping[str, Any]) -> StepControl:
        if control is not None and (control.triggered or control.done()):
            log.log(self.status_loglevel, "the round that was scheduled has failed: looking for another group")
            control = None
        if control is None:
            return self.schedule_step(**given)
        if (weight := given.get("weight")) is not None:
            control.weight = weight
        return control

    # -- results

    @property
    def averaging_in_progress(self) -> bool:
        """Whether a round runs in the background."""
        return any(update.is_averaging for update in self._updates)

    @property
    def _is_stepping(self) -> bool:
        """Whether the optimizer steps in the background."""
        return any(update.is_stepping for update in self._updates)

    def _settle(self, wait: bool, apply: bool) -> Gathered | None:
        """Wait for what is under way, and apply what is finished; what a finished round gathered."""
        gathered = None
        for update in list(self._updates):
            if wait:
                update.wait()
            if apply and update.done:
                self._updates.remove(update)
                gathered = self._apply(update) or gathered
            elif apply and not update.is_stepping:
                self._publish(update)
        return gathered

    def _apply(self, update: StateUpdate) -> Gathered | None:
        gathered = update.result()
        if gathered is not None:
            self._guarded.put(update.before)
            log.log(self.status_loglevel, "the state was averaged by %d peers", len(gathered))
        update.published = False
        self._publish(update)
        if gathered is not None and self.sync_epoch_when_averaging:
            epochs = [epoch for epoch in gathered.values() if isinstance(epoch, int) and 0 <= epoch < 1 << 53]
            self.local_epoch = max([self.local_epoch, *epochs])
        self._follow_epoch()
        return gathered

    def _publish(self, update: StateUpdate) -> None:
        # What can't be given to the model while a round runs comes with the round's result.
        if self.offload_optimizer and not update.published:
            update.published = self._guarded.publish()

    def _follow_epoch(self) -> None:
        """The scheduler follows, unless a step in the background is to be made with the old rate."""
        if not self._is_stepping:
            with self.lock_optimizer:
                self._local.update_scheduler(self.local_epoch)

    # -- state

    def get_current_state(self) -> tuple[Any, ...]:
        """The epoch, this peer's parameters, averaged statistics and extra tensors, and a `CompressionInfo` of each.
        (Newcomers get all statistics, the optimizer's options and the scheduler's state beside them.)"""
        with self._guarded.still(), torch.no_grad():
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._local.local]
        return {"epoch": self.local_epoch, "group_bits": self.get_group_bits()}, tensors, self._local.infos

    async def _take_snapshot(self) -> EncodedState:
        def take() -> Snapshot:
            with self._guarded.still():
                tip = Tip.genesis(self.prefix)
                tip = Tip(self.local_epoch, tip.lineage, float(self.local_epoch))
                return self._local.shared.snapshot(tip, self._state_compression)

        try:
            return await asyncio.to_thread(lambda: encoded(take()))
        except ValueError as error:
            log.warning("a newcomer can't have this peer's state: %s", error)
            raise Refused(str(error)) from error

    def load_state_from_peers(  # type: ignore[override]
        self, wait: bool = True, timeout: float | None = None
    ) -> bool:
        """Download the state that most peers have, the newest epoch's of equally many, and go on from it: parameters,
        optimizer, scheduler, extra tensors and epoch.

        Args:
            wait: must be True: the tensors are not to be used meanwhile.
            timeout: seconds; 60 when None.

        Returns whether it was taken over: not if it is of an epoch before this peer's.
        Raises AveragingError, and changes nothing, if nobody shares a state, none comes in time, or it does not fit.
        """
        if not wait:
            raise ValueError("wait=False: a state can't be written while its user goes on")
        self._settle(wait=True, apply=True)
        downloaded = self._submit(self._download(LOAD_TIMEOUT if timeout is None else timeout)).result()
        epoch = downloaded.manifest.tip.epoch
        if epoch < self.local_epoch:
            log.warning("the others' state is of epoch %d, before this peer's %d: not taken", epoch, self.local_epoch)
            return False
        with self._guarded.still():
            try:
                self._local.shared.load(downloaded)
            except ValueError as error:
                raise AveragingError(f"the state that was downloaded does not fit: {error}") from error
            self.local_epoch = epoch
            self._local.update_scheduler(epoch)
            self._local.publish()
        return True

    def shutdown(self) -> None:
        """See `DecentralizedAverager.shutdown`. A step in the background ends by itself."""
        super().shutdown()
        self._background.shutdown(wait=False, cancel_futures=True)
