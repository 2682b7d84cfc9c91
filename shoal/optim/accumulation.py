"""Uses the gradients of a peer within an epoch: accumulates them, or makes local steps with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from shoal.flat import grad_of
from shoal.health.record import FaultKind
from shoal.optim.accumulator import lost_gradient
from shoal.optim.closures import Closure, NotUsed, calls_once, kept_loss, loss_of
from shoal.optim.drift import Drift
from shoal.optim.epoch_round import Gradients, OwnRounds
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.state import Replica
from shoal.optim.strand_gradients import StrandGradients
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.loss import Loss, mean_of
from shoal.swarm.protocol.sparing import Sparing

log = logging.getLogger(__name__)

TOLD, TOLD_SECONDS = 8, 60.0  # warnings of gradients that are not finite: at most so many in so many seconds


class Accumulation:
    """Accumulates this peer's gradients within an epoch, or makes local updates or inner steps with them.

    Args:
        optimizer: the `shoal.Optimizer`, which a `GradScaler` takes.
        settings: the settings of the optimizer.
        run: this peer's part in the run.
        replica: makes the steps of local updates.
        gradients: accumulates the gradients, or makes the inner steps; None with local updates.

    Attributes:
        gradients: as given.
        drift: `gradients`, if they are a `Drift`; else None.
        loss: the mean loss of the samples that `close` has brought; None if a batch of them had no closure, or no loss
            that is a finite number.
    """

    def __init__(
        self, optimizer: Optimizer, settings: Settings, run: Run, replica: Replica, gradients: Gradients | None
    ) -> None:
        self._optimizer, self._replica, self._run = optimizer, replica, run
        self._reuse = settings.reuse_grad_buffers
        self.gradients = gradients
        self._own = gradients if isinstance(gradients, OwnRounds) else None
        self.drift = replica.drift = gradients if isinstance(gradients, Drift) else None
        self._local_samples = 0.0  # the samples of this epoch, with local updates
        self._scaler: GradScaler | None = None  # the scaler of the gradients that are accumulated in `.grad`
        self._warned = False  # whether a warning has said that no parameter has a gradient
        self.loss: Loss | None = None
        self._losses: list[tuple[Any, float]] = []  # of the batches with a closure: the loss, and the samples
        self._samples_with_loss = 0.0
        self._sparing = Sparing(TOLD, TOLD_SECONDS)
        self._told_of_losses = False  # whether a warning has told of a closure without a usable loss

    @property
    def samples(self) -> float:
        """The number of samples that this peer has accumulated in this epoch."""
        return self._local_samples if self.gradients is None else self.gradients.samples

    @property
    def progress(self) -> float:
        """This peer's progress in the epoch: inner steps if the target counts them, else samples."""
        return self.samples if self.drift is None else self.drift.progress

    @property
    def has_its_part(self) -> bool:
        """Whether inner steps are counted and this peer has made its own of this epoch."""
        steps = None if self.drift is None else self.drift.steps_of_epoch
        return steps is not None and self.progress >= steps

    def add(self, batch_size: int, grad_scaler: GradScaler | None, closure: Closure | None = None) -> None:
        """Use the parameters' `.grad`, the mean over `batch_size` samples. If no parameter has a gradient, the samples
        do not count.

        Args:
            batch_size: the number of samples.
            grad_scaler: the scaler of the gradients, or None.
            closure: the closure of the samples, or None. If nobody has called it yet, the step that is made here calls
                it, and the gradients are those that it leaves.

        Raises:
            ValueError: if a parameter has a gradient that was frozen when the optimizer was made, if the model's
                parameters were replaced, or if gradients that are accumulated in `.grad` were cleared.
        """
        replica = self._replica
        if not self.samples:  # once an epoch, before any gradient of wrong parameters is used
            replica.placement.check()
        self._check_held()
        try:
            if closure is None or closure.is_evaluated:
                self._check_gradients(batch_size)
            else:
                closure.after_first = lambda: self._check_gradients(batch_size)
            self._use(batch_size, grad_scaler, closure)
        except NotUsed:
            return
        if closure is not None and self.gradients is not None and self.drift is None:  # the step is made later
            self._losses.append((kept_loss(closure.returned), batch_size))
            self._samples_with_loss += batch_size

    def _check_gradients(self, batch_size: float) -> None:
        """Look at the gradients of a batch.

        Raises:
            ValueError: if a frozen parameter has one.
            NotUsed: if no parameter has one.
        """
        trained, frozen = self._replica.in_backward
        if any(grad is not None for grad in map(grad_of, frozen)):
            raise ValueError(
                "a parameter that was frozen (requires_grad=False) when the optimizer was made has a gradient now; the "
                "peers do not average it: make a new optimizer, under a new run_id, after thawing parameters"
            )
        if any(grad is not None for grad in map(grad_of, trained)):
            return
        self._replica.placement.check()  # modules may have other parameters now
        if not self._warned:
            self._warned = True
            log.warning(
                "step was told of %g samples, and no parameter has a gradient: they do not count; call backward() "
                "before step(), zero_grad() after it, and step(batch_size=0) where there are no samples (this is "
                "said once)",
                batch_size,
            )
        raise NotUsed

    def _use(self, batch_size: int, grad_scaler: GradScaler | None, closure: Closure | None) -> None:
        """Use the gradients, or those that `closure` leaves in the step that is made here.

        Raises:
            NotUsed: if they overflowed, or if the closure has left none. Then the samples do not count.
        """
        replica = self._replica
        if grad_scaler is not None and not grad_scaler.admits(self._optimizer):
            log.info("the gradients overflowed (grad_scaler): they are not used")
            if self._reuse:
                self.restart()  # the same `.grad` have the gradients of earlier steps
            raise NotUsed
        elif self.gradients is None:
            replica.placement.check_groups()
            replica.step_locally(closure)
            self._local_samples += batch_size
        else:
            if self.drift is not None and replica.is_at_start:
                replica.take_over()
            if self.drift is not None:
                replica.placement.check_groups()
            self.enter()
            if self.drift is not None:
                self.drift.accumulate(batch_size, closure)
            else:
                self.gradients.accumulate(batch_size)
            if self._reuse:
                self._scaler = grad_scaler

    def _mean_loss(self, samples: float) -> Loss | None:
        """The mean loss of the accumulated samples; None if some have none."""
        if not self._losses or self._samples_with_loss != samples:
            return None
        losses = [(loss_of(loss), weight) for loss, weight in self._losses]
        may_read = not self._told_of_losses and not calls_once(type(self._replica.wrapped))
        if may_read and any(loss is None for loss, _ in losses):
            self._told_of_losses = True
            log.warning(
                "step(closure): the closure has returned no finite number, so the epoch's step of all peers is made "
                "without a loss; return the loss, a tensor with one element (this is said once)"
            )
        return mean_of(losses)

    def _forget_losses(self) -> None:
        if self._losses:
            self._losses, self._samples_with_loss = [], 0.0

    def _check_held(self) -> None:
        gradients = self.gradients
        if not self._reuse or gradients is None or isinstance(gradients, Drift | StrandGradients):
            return
        if (index := gradients.accumulator.lost()) is not None:
            self.restart()
            raise lost_gradient(self._replica.placement.name_of(self._replica.trained[index]))

    def go_on(self) -> None:
        """Accumulate for the next epoch, while a round in the background averages this one."""
        if self.drift is not None:
            self.drift.go_on()
        else:
            self.restart()

    def apply(self, *, used: bool, is_accumulating: bool) -> None:
        """Set the model to the result of the step that ends an epoch.

        Args:
            used: whether the average has this peer's contribution.
            is_accumulating: whether this peer already accumulates for the next epoch.
        """
        if self.drift is not None:
            self._replica.placement.take_over()
            self.drift.apply(used=used)
            return
        self._replica.publish()
        if not is_accumulating:
            self.restart()

    def restart(self) -> None:
        """Drop all that this peer has accumulated."""
        self._local_samples = 0.0
        self._forget_losses()
        if self.gradients is not None:
            self.gradients.reset()
        if self._scaler is not None:
            self._scaler.release(self._optimizer)
            self._scaler = None

    def close(self) -> float:
        """Bring what this peer has accumulated to the round of the epoch.

        Returns:
            The number of samples behind it; 0 if an element is not finite.

        Raises:
            Behind: if the others have ended the epoch, and gradients with rounds of their own come too late.
            ValueError: if gradients that are accumulated in `.grad` were cleared.
        """
        if self.gradients is None:
            return self._local_samples
        self._check_held()
        if self._own is not None and not self._own.held and self._run.swarm.tip != self._replica.tip:
            raise Behind("the epoch has ended before this peer's gradients were averaged")
        held, samples = self._own is not None and self._own.held, self.samples
        usable = self.gradients.close(1.0 if self._scaler is None else self._scaler.get_scale())
        if not held:
            self.loss = self._mean_loss(samples) if usable else None
        if usable < samples and not held:  # a round that has begun has fewer: what came after it does not count
            self._forget_losses()
            what, then = "gradients", "it joins without them"
            if self.drift is not None:
                what, then = "inner steps", "it goes back to the anchor, and joins without them"
            fields = self._run.faults.add(FaultKind.NOT_FINITE, f"this peer's {what} have NaN or infinity")
            if self._sparing.allows(what.encode(), time.monotonic()):
                log.warning("this peer's %s are not finite (NaN or infinity): %s", what, then, extra=fields)
        return usable

    # -- gradients with rounds of their own

    def enter(self) -> None:
        """Join the peers that average gradients in rounds of their own, before the run counts on this peer."""
        if self._own is not None:
            self._own.enter(lambda: self._run.swarm.called or self._run.swarm.tip != self._replica.tip)

    def leave(self) -> None:
        """Leave these peers, so that nobody waits for this peer's gradients while it changes to another state."""
        if self._own is not None:
            self._own.leave()

    def averager_state(self) -> dict[str, Any]:
        """What the user's averager carries from one epoch to the next; {} without such an averager."""
        return {} if self._own is None else self._own.carried()

    def load_averager_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `averager_state` returned; with {}, as if the averager had averaged nothing.

        Raises:
            ValueError: if it is the state of another averager.
        """
        try:
            if self._own is not None:
                self._own.load_carried(state)
            elif state:
                raise ValueError("this optimizer has none")
        except ValueError as error:
            raise ValueError(
                f"the state dict was saved with another grad_averager_factory: {error}; to go on without what that "
                'averager kept, remove state_dict["shoal"]["grad_averager"]'
            ) from error

    def stop(self) -> None:
        """Leave for good. If a thread waits for an average, it gets an error."""
        if self._own is not None:
            self._own.stop()
