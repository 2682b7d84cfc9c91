"""Averages parameters, optimizer statistics and buffers from time to time, while each peer trains on its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Gathered, StepControl
from shoal.compression import CompressionInfo, TensorRole
from shoal.dht.dht import DHT
from shoal.flat import Places, members_of, needs_sparse_gradients, neutral, parameters_of, users_modes
from shoal.interrupts import finished, holding, result_of, users_handlers
from shoal.optim._torch import foreach_copy_
from shoal.optim.accumulator import in_grad
from shoal.optim.placement import check_places
from shoal.optim.settings import NAMES, AnyOptimizer, AnyScheduler, Params, Use, make_trained
from shoal.optim.state import TrainingState, for_newcomer, put_average
from shoal.optim.trainable import check_real, check_writable
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm
from shoal.transfer.donor import EncodedState, FrozenState

log = logging.getLogger(__name__)

LOAD_TIMEOUT = 60.0

# [Note: threads] Three kinds of threads change the optimizer's tensors: the trainer's, the one that steps in the
# background, and those of rounds. A thread that changes these tensors holds `lock_optimizer`. With `reuse_tensors` it
# then takes the averager's lock, too, because rounds read and write the same tensors.


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
        dht: this peer's place in the DHT, started.
        optimizer: a torch optimizer, or a function that makes one from `params`.
        params: parameters or parameter groups. Give it if, and only if, `optimizer` is a function.
        scheduler: a torch scheduler of the optimizer, or a function that makes one from it. It follows `local_epoch`.
        initialize_optimizer: make the optimizer create its statistics now, by a step with gradients of zero. The
            parameters stay as they are. None: do so if the optimizer has no statistics yet.
        offload_optimizer: make the optimizer over a copy of the parameters on the host. `step` sets the model's
            parameters to this copy.
        custom_gradients: you set the gradients of the optimizer's own parameters. Needs `offload_optimizer`.
        reuse_tensors: average the optimizer's tensors themselves, without a copy. Then the optimizer does not step
            while a round runs. None: True with `offload_optimizer` and without `delta_rule_averaging`.
        delta_rule_averaging: keep the changes that are made while a round runs in the background: a tensor becomes its
            average plus its change. Then peers do not hold the same bits.
        sync_epoch_when_averaging: after a round, continue at the highest epoch of the group.
        parameter_names: a name for each parameter, in their order, for a `compression` that chooses by name. By default
            their numbers.
        average_opt_statistics: names of the optimizer's statistics that are averaged.
        extra_tensors: tensors that are averaged and that newcomers get, too.
        status_loglevel: the level of the log lines about rounds.
        performance_ema_alpha: accepted without effect: this averager predicts nothing.
        start: join the run now.
        kwargs: the other arguments of `DecentralizedAverager`, among them `prefix`.

    Attributes:
        local_epoch: this peer's epoch; you may set it.
        optimizer: the optimizer that is stepped.
        scheduler: the scheduler that follows `local_epoch`, or None.
        extra_tensors: as given, as a list.
        main_parameters: the model's parameters.
        opt_keys_for_averaging: `average_opt_statistics`, as a tuple.
        lock_optimizer: the lock that is held while the optimizer's tensors change. Hold it to read or change them.

    Raises:
        ValueError: if arguments do not go together, and as `DecentralizedAverager`.
    """

    @holding
    @neutral
    def __init__(
        self,
        *,
        dht: DHT,
        optimizer: AnyOptimizer,
        params: Params | None = None,
        scheduler: AnyScheduler | None = None,
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
        start: bool,
        **kwargs: Any,
    ) -> None:
        names = average_opt_statistics if isinstance(average_opt_statistics, str) else tuple(average_opt_statistics)
        NAMES.check("average_opt_statistics", names)
        if custom_gradients and not offload_optimizer:
            raise ValueError("custom_gradients=True is for an optimizer with parameters of its own: offload_optimizer")
        if reuse_tensors is None:
            reuse_tensors = offload_optimizer and not delta_rule_averaging
        if reuse_tensors and delta_rule_averaging:
            raise ValueError("delta_rule_averaging=True needs copies of what it averages: leave reuse_tensors out")
        self.offload_optimizer, self.custom_gradients = offload_optimizer, custom_gradients
        self.reuse_tensors, self.delta_rule_averaging = reuse_tensors, delta_rule_averaging
        self.sync_epoch_when_averaging, self.status_loglevel = sync_epoch_when_averaging, status_loglevel
        self.opt_keys_for_averaging, self.extra_tensors = tuple(names), list(extra_tensors)
        check_real(self.extra_tensors, "extra tensor")
        check_writable(self.extra_tensors, "extra tensor")
        use = Use(on_host=offload_optimizer, in_background=True)
        self.optimizer, self.scheduler, host = make_trained(optimizer, params, scheduler, use)
        if initialize_optimizer or (initialize_optimizer is None and not any(self.optimizer.state.values())):
            _initialize_state(self.optimizer)
        self._state = TrainingState(self.optimizer, self.scheduler, self.extra_tensors, flat=False)
        self.main_parameters = tuple(self._state.parameters if host is None else host.model)
        self._places = Places(self.main_parameters)
        self._places.keep()
        self.lock_optimizer = threading.RLock()
        self.local_epoch = 0
        self._updates: list[StateUpdate] = []  # the updates that are under way or not applied yet, in their order
        self._background = ThreadPoolExecutor(1, thread_name_prefix="shoal-state")
        tensors = self._own_tensors()
        averaged = tensors if reuse_tensors else [_host_copy(tensor) for tensor in tensors]
        self._infos = self._infos_of(averaged, parameter_names)
        kwargs.setdefault("tensor_infos", self._infos)
        super().__init__(averaged, dht, start=False, **kwargs)
        self._share_by(self._for_newcomer)
        if start:
            self._start()

    def _infos_of(self, averaged: Sequence[torch.Tensor], names: Sequence[str | int] | None) -> list[CompressionInfo]:
        """Name, role and kind of each averaged tensor: first the parameters, then the statistics (one name after the
        other), then the extra tensors.

        Raises:
            ValueError: if there are not as many names as parameters.
        """
        count = len(self._state.parameters)
        names = range(count) if names is None else names
        if len(names) != count:
            raise ValueError(f"parameter_names has {len(names)} names, and there are {count} parameters")
        given: list[tuple[str | int, TensorRole, str]] = [(name, TensorRole.PARAMETER, "") for name in names]
        for statistic in self.opt_keys_for_averaging:
            given += [(f"{name}.{statistic}", TensorRole.OPTIMIZER, statistic) for name in names]
        given += [(number, TensorRole.UNSPECIFIED, "") for number in range(len(self.extra_tensors))]
        return [CompressionInfo.from_tensor(tensor, *of) for tensor, of in zip(averaged, given, strict=True)]

    # -- steps

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now, for the round of a later `step(averaging_control=…)`.

        Args:
            scheduled_time: the time of that call, in seconds of `get_dht_time()`.
            kwargs: arguments of `DecentralizedAverager.step`.

        Returns:
            The control to give to `step`.
        """
        given = {"gather": self.local_epoch, **kwargs}
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **given)
        assert isinstance(control, StepControl)
        return control

    @holding
    @neutral
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
        """Do what the arguments ask for, in the order of the arguments.

        If an earlier step in the background has raised an error, this call raises it.

        Args:
            wait_for_delayed_updates: wait for what runs in the background. None: wait before a round and, without the
                delta rule, before the optimizer's step, because the result of the background would overwrite the
                result of this step.
            apply_delayed_updates: set the tensors to the results of the background.
            increment_epoch: add 1 to `local_epoch`. The scheduler follows, after the optimizer's step if there is one.
            optimizer_step: step the optimizer.
            zero_grad: clear the gradients.
            delay_optimizer_step: make the optimizer's step in the background, and apply its result in a later call.
                Needs `offload_optimizer`.
            averaging_round: average with peers. If the round fails, a log line says so, and nothing changes.
            delay_averaging: average in the background, and apply the result in a later call. As
                `delay_optimizer_step` when None.
            averaging_control: a round that `schedule_step` has scheduled for this call.
            wait_for_trigger: a function that is called before the optimizer's step, in the thread that makes the step.
                If it raises an error, nothing is stepped or averaged. Needs `reuse_tensors` or `custom_gradients`.
            grad_scaler: a scaler that steps the optimizer.
            set_to_none: clear gradients by setting them to None; if False, to zeros.
            averaging_opts: arguments of `DecentralizedAverager.step`: weight, timeout and so on.

        Returns:
            The epochs of the members of a round's group, by peer id, if a round was finished in this call; else None.

        Raises:
            ValueError: if arguments do not go together.
        """
        if delay_averaging is None:
            delay_averaging = delay_optimizer_step
        acts = optimizer_step or zero_grad or averaging_round
        if wait_for_delayed_updates is None:
            overlaps = self.delta_rule_averaging and not self._is_stepping
            wait_for_delayed_updates = averaging_round or (optimizer_step and not overlaps)
        if averaging_round and not (wait_for_delayed_updates and apply_delayed_updates):
            raise ValueError("averaging_round=True needs wait_for_delayed_updates and apply_delayed_updates")
        if delay_optimizer_step and not self.offload_optimizer:
            raise ValueError("delay_optimizer_step=True needs an optimizer on the host: offload_optimizer=True")
        if delay_optimizer_step and averaging_round and not delay_averaging:
            raise ValueError("a round after a delayed optimizer step is delayed, too: leave delay_averaging=False out")
        if averaging_control is not None and not averaging_round:
            raise ValueError("averaging_control= is for a round: averaging_round=True")
        if wait_for_trigger is not None and not acts:
            raise ValueError("wait_for_trigger= comes before a step or a round, and none was asked for")
        if wait_for_trigger is not None and not (self.reuse_tensors or self.custom_gradients):
            raise ValueError("wait_for_trigger= needs reuse_tensors=True or custom_gradients=True")
        gathered = self._settle(wait_for_delayed_updates, apply_delayed_updates)
        self.local_epoch += increment_epoch
        if not acts:
            self._follow_epoch()
            return gathered

        update = StateUpdate()
        if averaging_round:
            update.round = self._open_round(averaging_control, averaging_opts or {})
        if self.offload_optimizer and not self.custom_gradients and (optimizer_step or zero_grad):
            for mine, main in zip(self._state.parameters, self.main_parameters, strict=True):
                mine.grad = None if main.grad is None else main.grad.detach().to(mine, copy=True)

        def work() -> None:
            try:
                if wait_for_trigger is not None:
                    with users_handlers(), users_modes():
                        wait_for_trigger()
                with self.lock_optimizer:
                    if optimizer_step:
                        self._step_optimizer(grad_scaler)
                    if zero_grad:
                        self._zero_grad(set_to_none)
                    self._step_scheduler()
                if update.round is not None:
                    update.before = self._take()
                    update.round.allow_allreduce()
            except BaseException:  # whatever the user's optimizer raised: the others must not wait for this peer
                if update.round is not None:
                    update.round.cancel()
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
        try:
            update.wait()
        except BaseException:  # Ctrl-C: the next step applies it
            self._updates.append(update)
            raise
        return self._apply(update) or gathered

    def _open_round(self, control: StepControl | None, given: Mapping[str, Any]) -> StepControl:
        if control is not None and (control.triggered or control.done()):
            log.log(self.status_loglevel, "the round that was scheduled has failed: looking for another group")
            control = None
        if control is None:
            return self.schedule_step(**given)
        if (weight := given.get("weight")) is not None:
            control.weight = weight
        return control

    def _step_optimizer(self, scaler: torch.amp.GradScaler | None) -> None:
        check_places(self._places, lambda index: f"parameter {index}", "averager")
        with self._still():
            step: Callable[[], object] = self.optimizer.step
            step() if scaler is None else scaler.step(self.optimizer)

    def _zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        for parameter in self.main_parameters if self.offload_optimizer else ():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _step_scheduler(self) -> None:
        """Step the scheduler until it is at this peer's epoch."""
        while self.scheduler is not None and self.scheduler.last_epoch < self.local_epoch:
            self.scheduler.step()

    # -- between the optimizer and a round

    def _own_tensors(self) -> list[torch.Tensor]:
        """The tensors that the optimizer works on, as they are averaged, and the extra ones.

        Raises:
            ValueError: if a statistic is missing.
        """
        found = list(self._state.parameters)
        for name in self.opt_keys_for_averaging:
            statistics = [tensor for tensor in self._state.statistics(name) if tensor is not None]
            if len(statistics) < len(self._state.parameters):
                raise ValueError(f"average_opt_statistics has {name!r}, but the optimizer has no statistics yet: "
                                 "leave initialize_optimizer out, or make a step first")  # fmt: skip
            found += statistics
        return found + self.extra_tensors

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Within, neither another thread nor a round changes the optimizer's tensors."""
        with self.lock_optimizer, self.get_tensors() if self.reuse_tensors else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def _take(self) -> list[torch.Tensor] | None:
        """Copy the optimizer's tensors to the averaged ones. With the delta rule, return another copy for `_put`."""
        with self.lock_optimizer, self.get_tensors() as averaged:
            if not self.reuse_tensors:
                foreach_copy_(list(averaged), self._own_tensors())
            return [tensor.clone() for tensor in averaged] if self.delta_rule_averaging else None

    def _put(self, before: Sequence[torch.Tensor | None] | None) -> None:
        """Set the optimizer's tensors to their averages. With `before`, the copies that `_take` made, by the delta
        rule."""
        if self.reuse_tensors:
            return
        with self.lock_optimizer, self.get_tensors() as averaged:
            olds = before or [None] * len(averaged)
            for tensor, average, old, info in zip(self._own_tensors(), averaged, olds, self._infos, strict=True):
                put_average(tensor, average, old, info.role)

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
        """Wait for the updates that are under way, and apply those that are finished. Returns what a finished round
        gathered."""
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
            self._put(update.before)
            log.log(self.status_loglevel, "the state was averaged by %d peers", len(gathered))
        update.published = False
        self._publish(update)
        if gathered is not None and self.sync_epoch_when_averaging:
            epochs = [epoch for epoch in gathered.values() if isinstance(epoch, int) and 0 <= epoch < 1 << 53]
            self.local_epoch = max([self.local_epoch, *epochs])
        self._follow_epoch()
        return gathered

    def _publish(self, update: StateUpdate) -> None:
        """Set the model's parameters to the optimizer's. Do nothing while a round may be writing the optimizer's: the
        model then gets them with the result of the round."""
        if update.published or not self.offload_optimizer:
            return
        with self.lock_optimizer:
            writing = self.lock_averaged_tensors if self.reuse_tensors else threading.Lock()
            if writing.acquire(blocking=False):
                try:
                    self._copy_to_model()
                    update.published = True
                finally:
                    writing.release()

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        if self.offload_optimizer:
            foreach_copy_(list(self.main_parameters), self._state.parameters)

    def _follow_epoch(self) -> None:
        """Step the scheduler up to this epoch, unless a step in the background still needs the old learning rate."""
        if not self._is_stepping:
            with self.lock_optimizer:
                self._step_scheduler()

    # -- state

    @neutral
    def get_current_state(self) -> tuple[Any, ...]:
        """This peer's averaged state. (Newcomers get more: all statistics, the optimizer's options and the scheduler's
        state.)

        Returns:
            A dict with the epoch and the group bits; copies of the parameters, averaged statistics and extra tensors on
            the CPU; and a `CompressionInfo` of each of these tensors.
        """
        with self._still():
            tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._own_tensors()]
        return {"epoch": self.local_epoch, "group_bits": self.get_group_bits()}, tensors, self._infos

    async def _for_newcomer(self, swarm: Swarm) -> EncodedState:
        def take() -> FrozenState:
            with self._still():
                tip = Tip(self.local_epoch, Tip.genesis(self.prefix).lineage, float(self.local_epoch))
                return self._state.snapshot(tip, self._state_compression)

        return await for_newcomer(take)

    @holding
    @neutral
    def load_state_from_peers(  # type: ignore[override]
        self, wait: bool = True, timeout: float | None = None
    ) -> bool:
        """Download the state that most peers have, and continue from it: parameters, optimizer, scheduler, extra
        tensors and epoch. If equally many peers have several states, the newest is taken.

        Args:
            wait: must be True: you may not use the tensors during the download.
            timeout: the time in seconds without any progress after which the download fails; 60 when None.

        Returns:
            Whether this peer took over the state. It did not if the state is of an epoch before this peer's.

        Raises:
            AveragingError: if no peer shares a state, if none comes in time, or if it does not fit. Then nothing has
                changed.
            ValueError: for `wait=False`.
        """
        if not wait:
            raise ValueError("wait=False: a state can't be written while its user goes on")
        self._settle(wait=True, apply=True)
        downloaded = result_of(self._engine.submit(self._download(LOAD_TIMEOUT if timeout is None else timeout)))
        epoch = downloaded.manifest.tip.epoch
        if epoch < self.local_epoch:
            log.warning("the others' state is of epoch %d, before this peer's %d: not taken", epoch, self.local_epoch)
            return False
        with self._still():
            try:
                self._state.load(downloaded)
            except ValueError as error:
                raise AveragingError(f"the state that was downloaded does not fit: {error}") from error
            self.local_epoch = epoch
            self._step_scheduler()
            self._copy_to_model()
        return True

    def shutdown(self) -> None:
        """Leave the run, see `DecentralizedAverager.shutdown`. This call does not wait for a step in the background."""
        super().shutdown()
        self._background.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False, slots=True)
class StateUpdate:
    """A step of a `TrainingStateAverager` that may still be under way: the optimizer's step, and the round after it.

    Attributes:
        work: the optimizer's step and the beginning of the round, if the background makes them.
        round: the round that averages the state.
        before: with the delta rule, copies of the averaged tensors as they were before the round.
        published: whether the model has the parameters that the optimizer's step made.
    """

    work: Future[None] | None = None
    round: StepControl | None = None
    before: list[torch.Tensor] | None = None
    published: bool = False

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer's step is under way in the background."""
        return self.work is not None and not self.work.done()

    @property
    def is_averaging(self) -> bool:
        """Whether the round is under way."""
        return self.round is not None and not self.round.done()

    @property
    def done(self) -> bool:
        """Whether neither is under way."""
        return not self.is_stepping and not self.is_averaging

    def wait(self) -> None:
        """Wait until both are done, however they end."""
        for future in (self.work, self.round):
            if future is not None:
                finished(future)

    def result(self) -> Gathered | None:
        """What the round gathered; None if there was no round, or if it failed, which is logged. Call this when both
        are done. It raises the error of the work, and errors of the round that are not the network's."""
        if self.work is not None:
            self.work.result()
        if self.round is None:
            return None
        try:
            return self.round.result()
        except (AveragingError, CancelledError) as error:
            log.warning("the state was not averaged: %s", str(error) or "cancelled")
            return None


def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its statistics, by a step with gradients of zero. Afterwards, parameters and step
    counts are what they were."""
    members = [(m, p) for m in members_of(optimizer) for p in parameters_of(m)]
    parameters = [parameter for _, parameter in members]
    values = [parameter.detach().clone() for parameter in parameters]
    step: Callable[[], Any] = optimizer.step
    zeros = [
        zero.to_sparse(1) if needs_sparse_gradients(type(member)) else zero
        for (member, _), zero in zip(members, map(torch.zeros_like, parameters), strict=True)
    ]
    with in_grad(parameters, zeros):
        step()
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.dtype is torch.float64 else torch.float32
    return tensor.detach().to("cpu", dtype, copy=True)
