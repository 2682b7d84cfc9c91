"""What a peer does for the epoch that is under way: it accumulates gradients, or makes steps with them at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from shoal.flat import grad_of
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradients import Gradients, HeldGradients, lost_gradient
from shoal.optim.own_gradients import AveragerGradients
from shoal.optim.replica import Replica
from shoal.optim.run import Run
from shoal.swarm.protocol.errors import Behind

log = logging.getLogger(__name__)


class Accumulation:
    """From the first batch of an epoch to its end, again and again.

    Args:
        optimizer: whose gradients they are, as a `GradScaler` knows it.
        replica: makes the steps of local updates.
        gradients: accumulates; None with local updates.
        run: whose epochs these are.
        reuse: whether gradients are accumulated in `.grad` itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        gradients: Gradients | None,
        run: Run,
        *,
        reuse: bool,
    ) -> None:
        self._optimizer, self._replica, self._run, self._reuse = optimizer, replica, run, reuse
        self._gradients = gradients
        self._own = gradients if isinstance(gradients, AveragerGradients) else None
        self._local_samples = 0.0  # with local updates
        self._scaler: GradScaler | None = None  # of the gradients that are accumulated in `.grad`
        self._held = HeldGradients(replica.trained)  # those
        self._warned = False  # that no parameter has a gradient

    @property
    def samples(self) -> float:
        """That this peer has accumulated in this epoch."""
        return self._local_samples if self._gradients is None else self._gradients.samples

    def add(self, batch_size: int, grad_scaler: GradScaler | None) -> None:
        """Use the parameters' `.grad`, the mean over `batch_size` samples; where no parameter has one, the samples do
        not count. Raises ValueError if a parameter that was frozen from the beginning has one, or if gradients that are
        accumulated in `.grad` are there no more."""
        if any(grad is not None for grad in map(grad_of, self._replica.frozen)):
            raise ValueError(
                "a parameter that was frozen (requires_grad=False) when the optimizer was made has a gradient now; the "
                "peers do not average it: make a new optimizer, under a new run_id, after thawing parameters"
            )
        if not self.samples:  # once an epoch, before anything is computed with parameters that do not fit
            self._replica.placement.check()
        self._check_held()
        if all(grad is None for grad in map(grad_of, self._replica.trained)):
            self._replica.placement.check()  # is it because modules have other parameters?
            if not self._warned:
                self._warned = True
                log.warning(
                    "step was told of %g samples, and no parameter has a gradient: they do not count; call backward() "
                    "before step(), zero_grad() after it, and step(batch_size=0) where there are no samples (this is "
                    "said once)",
                    batch_size,
                )
            return
        if grad_scaler is not None and not grad_scaler.admits(self._optimizer):
            log.info("the gradients overflowed (grad_scaler): they are not used")
            if self._reuse:
                self.restart()  # what came before is in the same `.grad`
        elif self._gradients is None:
            self._replica.step_locally()
            self._local_samples += batch_size
        else:
            self.enter()
            self._gradients.accumulate(batch_size)
            if self._reuse:
                self._scaler = grad_scaler
                self._held.hold()

    def _check_held(self) -> None:
        if (index := self._held.lost()) is not None:
            self.restart()
            raise lost_gradient(self._replica.placement.name_of(self._replica.trained[index]))

    def restart(self) -> None:
        """Drop what was accumulated."""
        self._local_samples = 0.0
        self._held.release()
        if self._gradients is not None:
            self._gradients.reset()
        if self._scaler is not None:
            self._scaler.release(self._optimizer)
            self._scaler = None

    def close(self) -> float:
        """Make what was accumulated what this peer brings to the end of the epoch; returns how many samples are behind
        it: none if an element is not finite.

        Raises Behind if the others have ended the epoch, and gradients that would be averaged before the run's round
        come too late; ValueError if gradients that are accumulated in `.grad` are there no more.
        """
        if self._gradients is None:
            return self._local_samples
        self._check_held()
        if self._own is not None and not self._own.held and self._run.tip != self._replica.tip:
            raise Behind("the epoch has ended before this peer's gradients were averaged")
        samples = self.samples
        usable = self._gradients.close(1.0 if self._scaler is None else self._scaler.get_scale())
        if usable < samples:
            self._held.release()
            log.warning("this peer's gradients are not finite (NaN or infinity): it joins without them")
        return usable

    # -- where gradients have rounds of their own

    def enter(self) -> None:
        """Be known to those who average gradients, before the run counts on this peer."""
        if self._own is not None:
            self._own.enter(lambda: self._run.swarm.called or self._run.tip != self._replica.tip)

    def leave(self) -> None:
        """Be waited for no more, while this peer goes over to another state."""
        if self._own is not None:
            self._own.leave()

    def averager_state(self) -> dict[str, Any]:
        """What the averager carries from one epoch to the next."""
        return {} if self._own is None else self._own.averager.state_dict()

    def load_averager_state(self, state: Mapping[str, Any]) -> None:
        """Go on from that; from {} as if it had averaged nothing. Raises ValueError if it is another averager's."""
        try:
            if self._own is not None:
                self._own.averager.load_state_dict(state)
            elif state:
                raise ValueError("this optimizer has none")
        except ValueError as error:
            raise ValueError(
                f"the state dict was saved with another grad_averager_factory: {error}; to go on without what that "
                'averager kept, remove state_dict["shoal"]["grad_averager"]'
            ) from error

    def stop(self) -> None:
        """Leave for good; who waits for an average gets none."""
        if self._own is not None:
            self._own.averager.shutdown()
