"""One peer's way from epoch to epoch: it counts, ends the epoch with the others, and catches up where it fell back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from shoal.optim.accumulation import Accumulation
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.handover import Handover
from shoal.optim.machine import Machine
from shoal.optim.progress import RunProgress
from shoal.optim.replica import Replica
from shoal.optim.reports import Event, report_of
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.update import Averaged, Background, EpochEnd
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.transfer import DownloadFailed

log = logging.getLogger(__name__)


class Epochs:
    """All in the trainer's thread, within one call: what takes longer goes on in `background`.

    Args:
        settings: of the optimizer.
        run, replica: on the way.
        accumulation: what this peer has for the epoch that is under way.
        end, background: end an epoch, now or while the next one is accumulated.
        handover: downloads the state.
        tracker: counts.
        machine: is told when the state was averaged.
        tell: called with what has happened.

    Attributes:
        applied: the state that the model's parameters are at.
    """

    def __init__(
        self,
        settings: Settings,
        run: Run,
        replica: Replica,
        accumulation: Accumulation,
        end: EpochEnd,
        background: Background,
        handover: Handover,
        tracker: RunProgress,
        machine: Machine,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings, self._run, self._replica = settings, run, replica
        self._accumulation, self._end, self._background = accumulation, end, background
        self._handover, self._tracker, self._machine, self._tell = handover, tracker, machine, tell
        self.applied = self._counting = replica.tip  # the latter of what is accumulated

    def begin(self) -> None:
        """From now on the coordinator waits for this peer. Raises Rejected if the run goes by other terms."""
        if not self._handover.is_behind:
            self._accumulation.enter()
        try:
            self._tracker.report_local_progress(0.0)
        except Behind:
            log.info("the run has begun: the first step downloads the state")

    def advance(self, batch_size: int, grad_scaler: GradScaler | None) -> None:
        """Use the parameters' `.grad`, the mean over so many samples, and end the epoch if that is due; where others
        are past it, download their state instead. Raises as `Optimizer.step`."""
        if self._handover.is_behind:
            self._synchronise()
        elif batch_size:
            computed_at = self.applied
            apart = self._settings.in_background and not self._settings.reuse_grad_buffers
            if apart and self._accumulation.samples and not self._background.busy:
                # If the round was called while this step was under way, the epoch does not need its samples, and the
                # next one begins with the same parameters. (Reused gradients have this step's in them already.)
                self._end_if_due()
            if self.applied == computed_at:  # not if another state was downloaded instead
                self._accumulation.add(batch_size, grad_scaler)
        self._count()

    # -- the end of an epoch

    def _count(self) -> None:
        """Report what was accumulated, and end the epoch if that is due."""
        accumulation, background = self._accumulation, self._background
        if background.failed:
            background.begin(background.samples)
        if background.busy:
            tip = background.tip
            if tip is not None:
                self.count_from(tip)
            elif accumulation.samples < (background.samples or self._settings.target_batch_size):
                return  # the round is under way, and what is accumulated belongs to an epoch without a name yet
            else:
                self.take_result(wait=True)  # this peer has its part of that epoch: one epoch late is the most
                if background.failed:
                    return  # the next step tries again
        self._end_if_due(accumulation.samples)

    def _end_if_due(self, samples: float | None = None) -> None:
        """End the epoch if its round is due, after `samples` were reported if there are more than before."""
        background = self._background
        try:
            if samples is not None:
                self._tracker.report_local_progress(samples)
            if self._tracker.ready_to_update_epoch:
                if background.busy:
                    self.take_result(wait=True)  # one epoch late is the most
                with self._tracker.paused():
                    self._end_epoch()
        except Behind as error:
            log.info("%s", error)
            if background.busy:
                self.take_result(wait=True)
            self._synchronise()

    def _end_epoch(self) -> None:
        """Now, or begin to in the background."""
        if self._end.few_are_here():
            return
        self._replica.take_over()
        samples = self._accumulation.close()
        self._end.take()
        if self._settings.averages_in_background:
            self._accumulation.restart()
            self._background.begin(samples)
            return
        averaged = self._end.average(samples)
        if averaged is None:
            return
        if averaged.donors or not self._settings.delay_optimizer_step:
            if not averaged.donors:
                self._end.step(averaged)
            self._apply(averaged)
        else:
            self._accumulation.restart()
            self._background.begin(samples, averaged)
            self.count_from(averaged.tip)

    def take_result(self, *, wait: bool) -> None:
        """If an epoch was ended in the background: apply it."""
        if not self._background.busy or not (wait or self._background.done):
            return
        try:
            with self._tracker.paused():
                averaged = self._background.take()
        except Behind as error:
            log.info("%s", error)
            self._synchronise()
            return
        if averaged is not None:
            if self._settings.use_local_updates:
                self._end.step(averaged)  # in this thread: it changes what the trainer computes with
            self._apply(averaged, accumulating=True)

    def _apply(self, averaged: Averaged, *, accumulating: bool = False) -> None:
        """The step was made: go on from the state that it led to. With `accumulating`, the next epoch has begun."""
        if averaged.donors:
            self._synchronise(averaged.donors)
            return
        self._end.put(averaged)
        if averaged.with_state:
            self._machine.has_averaged_state(averaged.tip.epoch, whole=self._replica.is_averaged_whole)
        self._replica.publish()
        self._handover.ended_epoch([m.key for m in averaged.outcome.begin.members] if averaged.outcome else [])
        self.applied = averaged.tip
        if not accumulating:
            self._accumulation.restart()
        self.count_from(averaged.tip)
        if averaged.outcome is not None:
            self._tell(report_of(averaged.outcome, self._replica.tip.epoch, self._replica.digest))

    def count_from(self, tip: Tip) -> None:
        """What is accumulated from now on belongs to the epoch that begins with that state."""
        if self._counting != tip:
            self._counting = tip
            self._tracker.start_epoch(tip)

    # -- another state

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer`."""
        self.take_result(wait=True)
        state = self._replica.state_dict()
        state["shoal"]["grad_averager"] = self._accumulation.averager_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Optimizer`."""
        self.take_result(wait=True)
        self._accumulation.leave()
        self._accumulation.load_averager_state(state_dict.get("shoal", {}).get("grad_averager", {}))
        self._replica.load_state_dict(state_dict, self._settings.target_batch_size)
        self._run.follow(self._replica.tip)
        self._go_on_from(self._replica.tip)

    def load_state(self, timeout: float) -> bool:
        """Download the state that most peers hold, and go on from it; whether that was done: not if there is nobody to
        ask. Raises AveragingError if nobody could bring it within `timeout` seconds, Rejected if it does not fit."""
        self.take_result(wait=True)
        donors = self._run.donors()
        try:
            return bool(donors) and self._download(donors, timeout)
        except DownloadFailed:
            if self._run.donors():
                raise
            return False  # all that were asked have left meanwhile

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Download the state; if that fails, go on, and try again in a while. Raises Rejected if it can't fit a
        newcomer."""
        timeout = self._settings.load_state_timeout
        try:
            if self._download(donors, timeout) if donors else self.load_state(timeout):
                return
        except AveragingError as error:
            if isinstance(error, Rejected) and not self._run.made:
                raise
            log.warning("could not download the state that others hold, and go on from this peer's own: %s", error)
        self._run.forget_behind()

    def _download(self, donors: Sequence[PeerID], timeout: float) -> bool:
        self._accumulation.leave()
        report = self._handover.download(donors, timeout)
        if report is None:
            return False
        self._go_on_from(self._replica.tip)
        self._tell(report)
        return True

    def _go_on_from(self, tip: Tip) -> None:
        """The replica is at another state, not by a round."""
        self._run.tell_state_changed()
        self._background.failed = False
        self._accumulation.restart()
        self.applied = self._counting = tip
        self._accumulation.enter()
        self._tracker.start_epoch(tip)
        self._tracker.restart_clock()
