"""Takes one peer from epoch to epoch: the peer accumulates, ends the epoch with the others, and catches up if it is
late."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from msgspec.structs import replace

from shoal.health.record import FaultKind
from shoal.interrupts import finished, unbroken
from shoal.membership.pin import Pin
from shoal.optim.accumulation import Accumulation
from shoal.optim.closures import Closure
from shoal.optim.drift import Drift
from shoal.optim.epoch_round import Averaged, EpochRound, report_of
from shoal.optim.forks import Forks
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.kept import Keeper, Kept, read_kept
from shoal.optim.progress import RunProgress
from shoal.optim.reports import DownloadReport, Event
from shoal.optim.run import Run, until
from shoal.optim.settings import Settings
from shoal.optim.state import AS_OBJECT, Replica, Rewritten, for_newcomer
from shoal.optim.strand_replica import StrandReplica
from shoal.optim.strand_rounds import StrandRounds
from shoal.optim.turns import are_several, is_called_away, wait_for
from shoal.p2p.identity import PeerID
from shoal.swarm.loading import DoesNotFit
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, Offer, StateDonor
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, NothingWanted

log = logging.getLogger(__name__)

KEPT_AGAIN_SECONDS = 60.0  # the time until this peer tries again to load a kept state for which it had no memory
LONGEST_REST = 600.0  # seconds after which a newcomer that does not fit into the run asks again at the latest
APPLY_SECONDS = 5.0  # a newcomer waits so long for a commit that this peer has not applied yet


class EpochState(Enum):
    """The state of a peer with respect to the end of an epoch. The trainer's thread makes every transition, within its
    calls; or the background thread on its behalf, while it waits in another optimizer (`close_on_loan`).

    A round or a download that the trainer waits for begins and ends within one call, in ACCUMULATING.
    """

    ACCUMULATING = auto()
    """This peer accumulates, and nothing is under way in the background.

    To AVERAGING: the round of the epoch is due, and this peer averages in the background.
    To STEPPING: the round is over, and this peer steps in the background.
    To CLOSED: the optimizer is shut down. (From every state.)
    """
    AVERAGING = auto()
    """The background thread averages, while this peer accumulates for the next epoch, whose tip is not known yet. (In
    the modes without a background, this peer is on loan: it accumulates nothing until it has applied the result.)

    To STEPPING: the average is there, and with it the tip of the next epoch.
    To FAILED: there was no average, or the thread raised an error.
    To ACCUMULATING: the same, on loan; this peer has still accumulated what it brought.
    To ACCUMULATING: other peers have ended the epoch, so this peer downloads their state.
    """
    STEPPING = auto()
    """The round is over. The background thread steps, while this peer accumulates for the next epoch.

    To ACCUMULATING: the trainer's thread applies the step.
    To FAILED: the step raised an error.
    """
    FAILED = auto()
    """The end of the epoch in the background has failed. This peer keeps what it brought to the round.

    To AVERAGING: the next call of `step` tries again.
    To ACCUMULATING: another state is downloaded or loaded.
    """
    CLOSED = auto()
    """The optimizer was shut down."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of an epoch in the background.

    Attributes:
        tip: a future of the tip of the next epoch.
        result: a future of the result; it is done when the thread is done.
        on_loan: whether this peer averages in the background only because its trainer waited in another optimizer. What
            it has brought stays accumulated until the result is applied, and nothing is added to it.
    """

    tip: Future[Tip]
    result: Future[Averaged | None]
    on_loan: bool = False


class Epoch:
    """Each epoch of a peer, from the first batch to the step that ends it.

    The trainer's thread calls all methods, except that the reactor calls `donor`, `take_snapshot` and `priority`.

    Args:
        settings: the settings of the optimizer.
        run: this peer's part in the run.
        replica: this peer's state.
        accumulation: what this peer has accumulated in the present epoch.
        tracker: counts the samples of all peers.
        tell: called with each event.

    Attributes:
        state: see `EpochState`.
        applied: the tip of the model's parameters.
    """

    def __init__(
        self,
        settings: Settings,
        run: Run,
        replica: Replica,
        accumulation: Accumulation,
        tracker: RunProgress,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings, self._run, self._replica = settings, run, replica
        self._accumulation, self._tracker, self._tell = accumulation, tracker, tell
        self._gradients, self._drift = accumulation.gradients, accumulation.drift
        self._round = EpochRound(settings, run, replica, accumulation.gradients)
        # If the round was called during a step, that step's samples may begin the next epoch. So the epoch ends before
        # they are added. (Reused gradients have them in this epoch's sum already.)
        self._ends_before_adding = settings.in_background and not settings.reuse_grad_buffers
        self._averages_in_background = settings.averages_in_background
        # Otherwise the step changes the parameters that the trainer uses.
        self._steps_in_background = settings.in_background and not settings.use_local_updates
        self.state = EpochState.ACCUMULATING
        self._ending: _Ending | None = None  # in AVERAGING and STEPPING; in CLOSED, if it took longer than `close`
        self._brought = 0.0  # samples that this peer brought to that end of an epoch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-update")
        self.applied = self._counted_from = replica.tip  # the second one begins the epoch for which it accumulates
        self._made_with: frozenset[bytes] = frozenset()  # the peers that made its state with it, or sent it the state
        self._told_of_state = False  # whether a warning has told that newcomers can't be sent this peer's state
        self._forks = Forks(run, replica, Keeper(settings.kept_state_dir, run.me), tell)
        self._step_seconds = 0.0  # of the last step
        self._waited_at: Tip | None = None  # the tip at which this peer has waited for the inner steps of others
        self._kept_again_at = 0.0  # when to look for a kept state again, after there was no memory for it
        self._told_pin = 0  # the last pin for which a warning has said that nobody has its state

    @property
    def machine(self) -> str:
        """A name for everything on which the bits of this peer's step depend."""
        return self._round.machine.name

    @property
    def is_busy(self) -> bool:
        """Whether the end of an epoch is under way in the background, or not applied yet."""
        return self.state in (EpochState.AVERAGING, EpochState.STEPPING)

    @property
    def is_done(self) -> bool:
        """Whether the background thread has a result to apply."""
        ending = self._ending
        return ending is not None and ending.result.done()

    @property
    def _has_failed(self) -> bool:
        return self.state is EpochState.FAILED

    @property
    def is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's, and this peer is not about to reach it by itself."""
        behind = self._run.swarm.behind
        return behind is not None and not self.is_busy and behind.outranks(self._replica.tip)

    @property
    def _rests(self) -> bool:
        """Whether this peer could not download the state that others hold, or a download did not help (see
        `HiddenState`), and it waits before it tries again. Meanwhile it keeps its state, brings no samples and ends no
        epoch, so nobody waits for it."""
        is_suspected = self._round.hidden.rests(time.monotonic()) and bool(self._run.donors())
        return not self.is_busy and (is_suspected or self._run.swarm.rests(self._replica.tip))

    def begin(self) -> None:
        """From now on the coordinator waits for this peer.

        Raises:
            Rejected: if the run has other terms.
        """
        if not self.is_behind:
            self._accumulation.enter()
        try:
            self._tracker.report(0.0)
        except Behind:
            log.info("the run has begun: the first step downloads the state")

    def advance(self, batch_size: int, grad_scaler: GradScaler | None, closure: Closure | None = None) -> None:
        """Use the parameters' `.grad`, the mean over `batch_size` samples, and end the epoch if its round is due. If
        others have ended the epoch without this peer, download their state instead. `closure` is as in
        `Accumulation.add`. Raises as `Optimizer.step`."""
        self._forks.look(self._made_with)
        if not self._follow_pin() or self._rests:
            self._drop_reused()
            return
        if self.is_behind:
            if self._drift is not None and self._drift.has_moved and batch_size:
                self._accumulation.add(batch_size, grad_scaler, closure)  # the drift outlasts the download
            self._synchronise()
            self._drop_reused()
        elif batch_size:
            computed_at, accumulation = self.applied, self._accumulation
            if self._ends_before_adding and accumulation.samples and not self.is_busy and not self._has_failed:
                self._end_if_due()
            if self.applied == computed_at:  # otherwise another state was downloaded meanwhile
                accumulation.add(batch_size, grad_scaler, closure)
        self._count()

    def _drop_reused(self) -> None:
        """This peer does not use the batch of this step. Where gradients are accumulated in `.grad`, autograd has added
        the batch to those of earlier steps, so all of them are dropped."""
        if self._settings.reuse_grad_buffers:
            self._accumulation.restart()

    def assist(self) -> None:
        """Make the step of an auxiliary peer, which trains nothing and holds no state. It helps in the next round, if
        one is called within `matchmaking_time`.

        Raises:
            Rejected: if the run has other terms.
        """
        try:
            self._move(self._run.call(self._run.swarm.catch_up))
            self._tracker.report(0.0)
            if not self._run.wait_for_call(self._settings.matchmaking_time):
                return
            outcome = self._round.assist()
        except Rejected:
            raise
        except AveragingError as error:
            log.info("no round to assist in: %s", error)
            return
        self._move(outcome.commit.next_tip)
        self._tell(report_of(outcome, self._replica.tip.epoch, self._replica.state_digest))

    def _move(self, tip: Tip) -> None:
        self.applied = self._replica.tip = tip
        self._count_from(tip)

    # -- the end of an epoch

    def _count(self) -> None:
        """Report what this peer has accumulated, and end the epoch if its round is due."""
        if self._has_failed:
            self._replica.take_over()  # the user may have written since
            self._end_in_background(self._brought if self._drift is None else self._taken_anew(self._drift))
        if self.is_busy and self._result_is_due and self._settings.outer is not None and self._settings.outer.delay:
            self.take_result(wait=True)
            if self._has_failed:
                return  # the next step tries again
        if self.state is EpochState.AVERAGING:
            assert self._ending is not None
            if self._ending.tip.done():
                self.state = EpochState.STEPPING
                self._count_from(self._ending.tip.result())
            elif not self._has_its_part:
                return  # it accumulates for an epoch whose tip is not known yet
            else:
                self.take_result(wait=True)  # it has its part of that epoch, too: it may be one epoch late at most
                if self._has_failed:
                    return  # the next step tries again
        self._end_if_due(self._accumulation.progress)

    @property
    def _has_its_part(self) -> bool:
        """Whether this peer has accumulated as much as it brought to the epoch before."""
        if self._settings.counts_steps and not self._brought:
            return self._accumulation.has_its_part
        return self._accumulation.samples >= (self._brought or self._settings.target)

    @property
    def _result_is_due(self) -> bool:
        """Whether the result of the background may be applied: with `DiLoCo(overlap=n)`, after n inner steps."""
        outer = self._settings.outer
        return self._drift is None or outer is None or self._drift.steps >= outer.delay

    def _taken_anew(self, drift: Drift) -> float:
        """After a failed round, take the drift once more, with the inner steps made since. Returns its samples."""
        drift.take_back()
        samples = self._accumulation.close()
        drift.go_on()
        return samples

    def _end_if_due(self, samples: float | None = None) -> None:
        """End the epoch if its round is due. Report `samples` before, if they are given."""
        try:
            if samples is not None:
                self._tracker.report(samples, behind=self._accumulation.samples)
                self._wait_for_the_slower()
            if self._tracker.ready_to_update_epoch:
                if self.is_busy:
                    self.take_result(wait=True)  # one epoch late at most
                with self._tracker.paused():
                    self._end_epoch()
        except Behind as error:
            log.info("%s", error)
            if self.is_busy:
                self.take_result(wait=True)
            self._synchronise()

    def _wait_for_the_slower(self) -> None:
        """Wait for the inner steps of the others, once in an epoch, at most for `matchmaking_time`. A peer does so if
        inner steps are counted and it has made its own."""
        tip = self._replica.tip
        if self._accumulation.has_its_part and self._waited_at != tip and not self._tracker.ready_to_update_epoch:
            self._waited_at = tip
            with self._tracker.paused():
                self._run.wait_for_round(tip, self._settings.matchmaking_time)

    def _end_epoch(self) -> None:
        """End the epoch in this call, or begin to end it in the background."""
        averaged, samples = self._round.unused(), self._accumulation.samples
        if averaged is None:
            self._replica.placement.check_groups()
            self._round.vote()  # first: it refuses options, and then nothing has changed
            if self._round.few_are_here():
                return
            samples = self._close()
            if self._averages_in_background:
                self._end_in_background(samples)
                return
            if are_several() and not (self._settings.in_background or self._settings.reuse_grad_buffers):
                self._end_in_background(samples, on_loan=True)
                if self._ending is not None and not is_called_away(self._ending.result):
                    self.take_result(wait=True)
                return
            averaged = self._round.average(samples)
        if averaged is not None and self._settings.delay_optimizer_step and not averaged.donors:
            self._accumulation.restart()
            self._end_in_background(samples, averaged)
            self._count_from(averaged.tip)
        elif averaged is not None:
            if not averaged.donors:
                self._step(averaged)
            self._apply(averaged)

    def _close(self) -> float:
        """Bring what this peer has accumulated to the round. Returns the samples behind it."""
        self._replica.take_over()
        samples = self._accumulation.close()
        self._round.take(self._accumulation.loss)
        if self._averages_in_background:
            self._accumulation.go_on()
        return samples

    @property
    def may_close(self) -> bool:
        """Whether the round of this epoch is called, and nothing keeps this peer from it."""
        swarm, is_accumulating = self._run.swarm, self.state is EpochState.ACCUMULATING
        is_called = swarm.called and swarm.tip == self._replica.tip == self._counted_from
        rests = self._rests or self._replica.is_in_eval
        return is_accumulating and is_called and not self.is_behind and not rests and self._forks.due() is None

    @property
    def needs_trainer(self) -> bool:
        """Whether a round is called which this peer can't join before the trainer's thread has applied the last one."""
        ending = self._ending
        is_over = ending is not None and (ending.tip.done() or ending.result.done())
        return is_over and self._run.swarm.called

    def on_own_thread(self, act: Callable[[], None]) -> None:
        """Let the background thread do this, unless the optimizer is shut down."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(act).add_done_callback(_tell_failure)

    @torch.no_grad()
    def close_on_loan(self) -> None:
        """End the epoch on the background thread, which calls this while the trainer's thread waits in another
        optimizer. The next call of `take_result` applies the result, or raises what went wrong."""
        if not self.may_close:
            return
        try:
            self._replica.placement.check_groups()
            self._round.vote()
            if not self._round.are_enough_here():
                return
            samples = self._close()
        except Exception as error:  # noqa: BLE001 (the trainer hears of it)
            failed: Future[Averaged | None] = Future()
            failed.set_exception(error)
            self._ending, self.state = _Ending(Future(), failed, True), EpochState.AVERAGING
        else:
            self._end_in_background(samples, on_loan=not self._averages_in_background)

    def _end_in_background(self, samples: float, averaged: Averaged | None = None, *, on_loan: bool = False) -> None:
        """Average and step on the background thread. If `averaged` is given, only step.

        Args:
            samples: what this peer has brought.
            averaged: the result of the round.
            on_loan: see `_Ending`.
        """
        tip: Future[Tip] = Future()

        def end() -> Averaged | None:
            result = self._round.average(samples) if averaged is None else averaged
            if result is not None and not result.donors:
                tip.set_result(result.tip)
                if self._steps_in_background:
                    self._step(result)
            return result

        self._brought, self._ending = samples, _Ending(tip, self._thread.submit(end), on_loan)
        self.state = EpochState.AVERAGING if averaged is None else EpochState.STEPPING

    @torch.no_grad()
    def _step(self, averaged: Averaged) -> None:
        """Make the wrapped optimizer's step with the averaged gradients. With local updates, take over the averaged
        state instead."""
        as_grad, began = None if self._gradients is None else self._gradients.as_grad, time.perf_counter()
        if self._drift is not None and not averaged.used(self._run.me):
            self._drift.remember()
        loss = averaged.loss if self._drift is None else None
        self._replica.step(as_grad, averaged.tip, averaged.options, with_state=averaged.with_state, loss=loss)
        self._step_seconds = time.perf_counter() - began
        self._run.tell_state_changed()

    def wait(self) -> None:
        """Wait until the background thread is done, and leave its result where it is."""
        if self._ending is not None:
            finished(self._ending.result)

    def take_result(self, *, wait: bool) -> None:
        """Apply the result of the background thread, if there is one. Raises what the thread raised, but if others have
        ended the epoch without this peer, follow them.

        Args:
            wait: wait until the thread is done.
        """
        try:
            self._take_result(wait)
        except Behind as error:
            log.info("%s", error)
            self._synchronise()

    def _take_result(self, wait: bool) -> None:
        ending = self._ending
        if ending is None:
            return
        on_loan = ending.on_loan and self.state is not EpochState.CLOSED
        if not (ending.result.done() and self._result_is_due) and not (wait or on_loan):
            return
        if self.state is EpochState.CLOSED:
            self._apply_last()
            return
        try:
            with self._tracker.paused():
                averaged = self._result()
        except Behind:
            if self._drift is not None:
                self._drift.take_back()
            raise
        if averaged is not None:
            if not self._steps_in_background and not averaged.donors:
                if on_loan:
                    self._replica.take_over()  # what the user has written since the epoch was closed
                self._step(averaged)  # in this thread, because it changes the parameters that the trainer uses
            self._apply(averaged, is_accumulating=not on_loan)

    def _result(self) -> Averaged | None:
        """Wait for the result of the background thread. It is None if the thread found no average, or if another thread
        shuts the optimizer down and has taken the result."""
        ending = self._ending
        if ending is None:
            return None
        result = ending.result
        wait_for(result)
        if self._ending is not ending:
            return None  # a signal handler that ran meanwhile has taken it, by a call of its own
        error = result.exception()
        failed = result.result() is None if error is None else not isinstance(error, Behind)
        failed = failed and not ending.on_loan
        self._ending = None
        if self.state is not EpochState.CLOSED:
            self.state = EpochState.FAILED if failed else EpochState.ACCUMULATING
        return result.result()

    def _apply(self, averaged: Averaged, *, is_accumulating: bool = False) -> None:
        """Continue from the state after the step. With `is_accumulating`, this peer already accumulates for the next
        epoch."""
        used = averaged.used(self._run.me)
        if averaged.donors:
            if self._drift is not None and used:
                self._accumulation.restart()  # the others' state has this peer's drift; this peer downloads that state
                self._replica.publish()
            if self._round.hidden.rests(time.monotonic()):
                self._leave_round()
            else:
                self._synchronise(averaged.donors)
            return
        self._round.put(averaged)
        if averaged.with_state:
            self._round.machine.has_averaged_state(averaged.tip.epoch, whole=self._replica.is_averaged_whole)
        self._accumulation.apply(used=used, is_accumulating=is_accumulating)
        outcome = averaged.outcome
        members = [] if outcome is None else outcome.begin.members
        self._made_with = frozenset(member.key for member in members) - {self._run.me}
        self.applied = averaged.tip
        self._count_from(averaged.tip)
        self._look_at_state()
        if outcome is not None:
            epoch, digest, waiting = self._replica.tip.epoch, self._replica.state_digest, self._tracker.take_waited()
            before = self._gradients.moved if isinstance(self._gradients, StrandRounds) else None
            stepping, norm = self._step_seconds, self._replica.grad_norm
            self._tell(report_of(outcome, epoch, digest, waiting=waiting, stepping=stepping, norm=norm, before=before))

    def _look_at_state(self) -> None:
        """Tell once if something in this peer's state can't be sent to newcomers."""
        if not self._told_of_state and (what := self._replica.why_it_cannot_travel()):
            self._told_of_state = True
            fields = self._run.faults.add(FaultKind.STATE, what)
            log.warning(
                "newcomers can't join this run: %s, which they can't be sent. %s", what, AS_OBJECT, extra=fields
            )

    def _count_from(self, tip: Tip) -> None:
        """From now on, accumulate for the epoch that begins with the state `tip`."""
        if self._counted_from != tip:
            self._counted_from = tip
            if self._drift is not None:
                self._drift.begin(tip.epoch)
            self._tracker.start_epoch(tip)

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the background thread, and apply its step. If the step takes longer, a
        later call of `state_dict` waits for the step and applies it."""
        self._accumulation.stop()
        ending = self._ending  # the trainer may be waiting for it, too
        if ending is not None:
            finished(ending.result, timeout)
        self._thread.shutdown(wait=ending is None or ending.result.done())
        self.state = EpochState.CLOSED
        self.take_result(wait=False)

    def _apply_last(self) -> None:
        """Apply the result of a background thread that was at work when the optimizer was shut down."""
        averaged: Averaged | None = None
        on_loan = self._ending is not None and self._ending.on_loan
        try:
            averaged = self._result()
        except AveragingError as error:
            log.info("the end of an epoch was given up: %s", error)
        if averaged is not None and on_loan and not self._steps_in_background and not averaged.donors:
            self._step(averaged)
        if self._drift is None:
            self._replica.publish()
        elif averaged is not None and not averaged.donors:
            self._accumulation.apply(used=averaged.used(self._run.me), is_accumulating=True)
        self.applied = self._replica.tip

    # -- this peer's state, for newcomers

    def donor(self, service: str) -> StateDonor:
        """Make the donor that serves this peer's state to newcomers, under the name `service`."""
        node, allow = self._run.dht.node, self._settings.averager_opts.get("allow_state_sharing", True)
        gate, replica = self._run.swarm.gate, self._replica
        asked = self._run.swarm.keep_redo_log
        return StateDonor(node, service, self.take_snapshot, lambda: replica.tip, allow, gate, self._offered, asked)

    def _offered(self) -> Offer:
        return Offer(self.priority(), self._replica.line.to_wire())

    def priority(self) -> float:
        """The priority of this peer's state among the states that newcomers are offered. An outranked one comes
        last."""
        return -1.0 if self.is_behind else 0.0

    async def take_snapshot(self) -> EncodedState:
        """A copy of this peer's state for newcomers.

        Raises:
            Refused: if the state can't be sent.
        """
        # A newcomer waits until this peer has applied the last commit, but not forever: the trainer may have stopped.
        await until(lambda: self._replica.tip == self._run.swarm.tip, self._run.state_changed, APPLY_SECONDS)
        try:
            return await for_newcomer(self._replica.copy_for_newcomer)
        except Rewritten as why:
            log.info("a newcomer waits for this peer's state: %s", why)
            tip = self._replica.tip
            await until(lambda: self._replica.tip != tip, self._run.state_changed, APPLY_SECONDS)
        # Perhaps no step follows, because the trainer evaluates, or ends here. The newcomer may be at its last epoch.
        return await for_newcomer(lambda: self._replica.copy_for_newcomer(rewritten=True))

    # -- another state, for this peer

    def settle(self) -> None:
        """Wait for the background, and apply its result. A checkpoint that was loaded into the model alone is refused,
        because the result belongs to the model before."""
        if self.is_busy:
            self._replica.refuse_load()
        self.take_result(wait=True)

    def end(self) -> None:
        """Apply the last result. A model that was loaded meanwhile, to evaluate it for example, stays."""
        with self._replica.keeping_model(self.is_busy and self._replica.was_loaded):
            self.take_result(wait=True)

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer`."""
        self.settle()
        if self._drift is not None and self._replica.is_at_start and self.state is not EpochState.CLOSED:
            self._replica.take_over()  # the model is the anchor that is saved
        state = self._replica.state_dict()
        state["shoal"]["grad_averager"] = self._accumulation.averager_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Optimizer`."""

        def load() -> None:
            if self.state is not EpochState.CLOSED:
                given = state_dict.get("shoal", {}).get("grad_averager", {})
                self._accumulation.load_averager_state(given)
            self._replica.load_state_dict(state_dict)

        with self._replica.keeping_model(self.is_busy):  # it was loaded before, and a step may be under way
            self.take_result(wait=True)
        self.continue_from(load)

    def continue_from(self, load: Callable[[], None]) -> None:
        """Continue from another state, which `load` sets."""
        self.take_result(wait=True)
        if self.state is EpochState.CLOSED:
            load()
            self.applied = self._replica.tip
            return
        self._accumulation.leave()
        with unbroken():
            load()
            if not self._run.swarm.believes(self._replica.tip):  # its pin is of another run
                self._replica.tip = replace(self._replica.tip, pin=0)
            self._run.follow(self._replica.tip)
            self._restart(self._replica.tip, keeps_drift=self._drift is not None)

    def load_state(self, timeout: float) -> bool:
        """Download the state that most peers hold, and continue from it.

        Args:
            timeout: the time in seconds without any progress after which the download fails.

        Returns:
            Whether this peer took over a state. It did not if there was nobody to ask.

        Raises:
            AveragingError: if nobody could send the state.
            Rejected: if the state does not fit.
        """
        with self._replica.keeping_model(self.is_busy and self._replica.was_loaded):
            self.take_result(wait=True)
        donors = self._run.donors()
        try:
            return bool(donors) and self._download(donors, timeout, to_join=False)
        except DownloadFailed as error:
            if self._run.donors() or isinstance(error, NoMemoryForState):
                raise
            return False  # all peers that were asked have left meanwhile

    def _replay(self) -> None:
        """End the epochs that others have ended, one after another, each like an epoch whose round was missed. This
        stops where nobody brings the next round, as after a download that has begun long ago."""
        swarm, first = self._run.swarm, self._replica.tip
        try:
            while self.is_behind and swarm.tip == (before := self._replica.tip):
                if not self._run.learn_of_round():
                    break
                if self._has_failed:
                    self.state = EpochState.ACCUMULATING
                    if self._drift is not None:
                        self._drift.take_back()
                with self._tracker.paused():
                    self._end_epoch()
                self._take_result(wait=True)
                if self._replica.tip == before:
                    break
                self._follow_pin()
        except Behind as error:
            log.info("%s", error)
        if self._replica.tip != first:
            # As after a download: the schedulers of frameworks have not stepped this peer's options.
            self._replica.options.adopt(self._round.last_options)

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Replay the rounds that this peer lacks, or download the state. If that fails, keep this peer's own, and try
        again after a while.

        Raises:
            Rejected: if the state does not fit this peer, and this peer is a newcomer.
        """
        timeout, began = self._settings.load_state_timeout, time.monotonic()
        mine = self._replica.tip
        self._follow_pin()
        # The first round of a run is not replayed: each peer may have begun with parameters of its own.
        can_replay = self._run.swarm.can_replay and not self._round.hidden.is_suspected
        if not donors and mine.epoch and can_replay and self.is_behind:
            with self._run.loading():
                self._run.begin_replay()
                self._replay()
        if not donors and self._replica.tip != mine and not self.is_behind:
            return  # the others had followed the pin already
        donors = donors or self._run.donors()
        try:
            if donors and self._download(donors, timeout, to_join=True):
                return
        except AveragingError as error:
            if isinstance(error, Rejected) and not self._run.swarm.made:
                raise
            self._pause(began, error)
        else:
            self._pause(began)

    def _pause(self, began: float, error: AveragingError | None = None) -> None:
        """A download that began at `began` has brought no state. Do not try again for a while."""
        swarm, tip, cost = self._run.swarm, self._replica.tip, time.monotonic() - began
        self._run.ask_where_they_are(self._run.donors())  # others may be at this peer's state, and count on it
        if error is not None and swarm.tip != tip:
            self._leave_round()
        if isinstance(error, DoesNotFit):
            room_in = min(error.again, LONGEST_REST)
            seconds = self._run.call(lambda: swarm.wait_for_room(room_in))
        else:
            seconds = self._run.call(lambda: swarm.forget_behind(cost))
        if error is None:
            return
        what = "it brings no samples" if swarm.rests(tip) else "it goes on training with those that hold the same one"
        when = f"in {seconds:.0f} s" if math.isfinite(seconds) else "when others offer one"
        log.warning(
            "could not download the state that others hold: %s. This peer keeps its own; %s, and tries again %s",
            error, what, when, extra=self._run.faults.add(FaultKind.DOWNLOAD, str(error)),
        )  # fmt: skip

    def _leave_round(self) -> None:
        """Stay at this peer's own state: it does not follow the members of the last round, which must not wait."""
        self._accumulation.leave()
        self._run.follow(self._replica.tip)

    def _download(self, donors: Sequence[PeerID], timeout: float, *, to_join: bool) -> bool:
        """Set the replica to the state that most of the donors hold, among the states that are not behind this peer's,
        and follow the run from there. Returns whether there was such a state. If it raises, nothing has changed.

        Args:
            donors, timeout: as `load_state`.
            to_join: give up a state that comes too late to take part in the run's rounds.
        """
        with self._run.loading():
            return self._load_from(donors, timeout, to_join=to_join)

    def _load_from(self, donors: Sequence[PeerID], timeout: float, *, to_join: bool) -> bool:
        self._accumulation.leave()
        mine, is_behind, swarm, pin = self._replica.tip, self.is_behind, self._run.swarm, self._forks.due()
        # If somebody holds the state that the owner has pinned, this peer takes no other state.
        least = pin.number if pin is not None and is_behind and swarm.behind_pin >= pin.number else mine.pin

        def wanted(tip: Tip) -> bool:
            if tip.pin < least or not swarm.believes(tip):
                return False
            return tip.outranks(mine) if is_behind else not mine.outranks(tip)

        try:
            parts = self._fetch(donors, timeout, wanted, to_join=to_join)
        except NothingWanted as error:
            log.info("%s", error)
            return False
        state = parts[0]
        tip = state.manifest.tip
        givers = frozenset(donor.key for donor in state.chunks_from)
        # The drift of this peer's inner steps is kept on the new state, unless that state has it already, or the owner
        # has pinned another line of states.
        drift, is_in_theirs = self._drift, self._round.may_be_in(mine)
        can_keep = tip.pin == mine.pin and not self._replica.was_loaded
        may_keep = drift is not None and can_keep and (drift.has_moved or is_in_theirs)
        try:
            load = self._replica.make_ready(parts, keeps_drift=may_keep)
        except ValueError as error:
            raise Rejected(f"the run's state does not fit this peer: {error}") from error
        fork = self._forks.leave(tip, state.line, self._made_with, givers)
        with unbroken():
            if drift is not None and is_in_theirs:
                self._accumulation.apply(used=True, is_accumulating=True)
            keeps = drift is not None and can_keep and drift.has_moved
            load(keeps)
            self._run.follow(tip)
            self._round.hidden.has_loaded(whole=self._replica.was_taken_whole and not state.lossy)
            self._run.ask_where_they_are(state.chunks_from)  # unless they have waited, they are at a later state by now
            if state.lossy:
                self._round.machine.has_lossy_state(tip.epoch)
            digest = self._replica.state_digest.hex()
            was_made_apart, self._made_with = self._made_with.isdisjoint(givers), givers
            self._restart(tip, keeps_drift=keeps)
        if fork is not None:
            self._forks.left(fork)
        elif mine.epoch and was_made_apart and not tip.is_state_of(mine):
            self._forks.caught_up(mine, tip, givers)
        self._tell(DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest))
        return True

    def _fetch(
        self, donors: Sequence[PeerID], timeout: float, wanted: Callable[[Tip], bool], *, to_join: bool
    ) -> Sequence[Downloaded]:
        """Download this rank's parts of a state from the donors.

        Raises:
            DownloadFailed: if no donor could send it.
            DoesNotFit: with `to_join`, if it comes too late.
        """
        if not isinstance(self._replica, StrandReplica):
            return [self._run.download(donors, timeout, self._replica.max_nbytes, wanted, to_join=to_join)]
        swarm = self._run.swarm
        return self._replica.download(donors, timeout, wanted, None if swarm.loading is None else swarm.reserve)

    # -- what the owner has pinned

    def _follow_pin(self) -> bool:
        """Follow the newest pin of the run's owner, as far as this peer can without a download.

        Returns:
            Whether this peer may continue. A newcomer may begin only from the pinned state or its descendants.
        """
        if self._forks.due() is not None and self.is_busy:
            self.take_result(wait=True)
        pin = self._forks.due()
        if pin is None:
            return True
        if self._forks.follows_from(pin):
            tip = replace(self._replica.tip, pin=pin.number)
            log.info(
                "the owner has pinned %s (pin %d): this peer's state %s leads on from it", pin.tip, pin.number, tip
            )
            self._replica.tip = self.applied = tip
            self._run.follow(tip)
            self._count_from(tip)
            return True
        if self._return_to_kept(pin):
            return True
        is_new = self._replica.tip.epoch == 0 < pin.epoch
        if is_new:
            self._run.wait_for_pin(pin.number, self._settings.matchmaking_time)
        if self._run.swarm.behind_pin >= pin.number:
            return True  # this peer is behind, and downloads the pinned state
        if self._told_pin != pin.number:
            self._told_pin = pin.number
            log.warning(
                "the owner has pinned %s (pin %d), and nobody in reach holds that state or one that leads on from it: "
                "this peer %s until somebody does",
                pin.tip, pin.number, "waits" if is_new else "goes on from its own",
            )  # fmt: skip
        return not is_new

    def _return_to_kept(self, pin: Pin) -> bool:
        """Continue from the state that this peer has kept, if `pin` allows it. Returns whether it did."""
        if time.monotonic() < self._kept_again_at:
            return False
        try:
            kept = self._forks.kept(pin)
            if kept is not None:
                self._continue_from(kept, pin.number)
        except NoMemoryForState as error:
            self._told_pin, self._kept_again_at = pin.number, time.monotonic() + KEPT_AGAIN_SECONDS
            log.warning(
                "the owner has pinned %s (pin %d), and this peer can't continue from the state that it had left: %s; "
                "it tries again in %g s", pin.tip, pin.number, error, KEPT_AGAIN_SECONDS,
            )  # fmt: skip
            return False
        return kept is not None

    def _continue_from(self, kept: Kept, pin: int) -> None:
        """Continue from a state that a peer has left and kept.

        Args:
            kept: the state.
            pin: the number of its pin.

        Raises:
            ValueError: if the state does not fit this model. Then nothing has changed.
            NoMemoryForState: if there is no memory for it. Then nothing has changed.
        """
        state = kept.as_downloaded(pin)
        tip = state.manifest.tip
        load = self._replica.make_ready([state])
        fork = self._forks.leave(tip, state.line, self._made_with, [])
        self._accumulation.leave()
        with unbroken():
            load(False)  # with an outer optimizer, the model becomes the anchor
            self._run.follow(tip)
            self._made_with = frozenset()
            self._restart(tip)
        log.warning("this peer continues from the state that it had left: epoch %d, tip %s", tip.epoch, tip)
        if fork is not None:
            self._forks.left(fork)

    def load_kept(self, path: str | os.PathLike[str] | None) -> None:
        """See `Optimizer.load_kept_state`."""
        self.take_result(wait=True)
        kept = self._forks.in_memory if path is None else read_kept(path)
        if kept is None:
            raise ValueError("this peer has kept no state in its memory: give the file")
        tip = kept.snapshot.tip
        self._continue_from(kept, tip.pin if self._run.swarm.believes(tip) else 0)

    def _restart(self, tip: Tip, *, keeps_drift: bool = False) -> None:
        """Begin an epoch from a state that is not the result of the last round."""
        self._run.tell_state_changed()
        if self.state is EpochState.FAILED:
            self.state = EpochState.ACCUMULATING
        if self._drift is not None and keeps_drift:
            self._drift.take_back()
        else:
            self._accumulation.restart()
        self.applied = self._counted_from = tip
        if self._drift is not None:
            self._drift.begin(tip.epoch)
        self._accumulation.enter()
        self._tracker.start_epoch(tip)
        self._tracker.restart_clock()


def _tell_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("an epoch could not be closed while its trainer waited in another run", exc_info=error)
