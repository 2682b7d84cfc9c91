"""Gradients that an averager of the user's own (`grad_averager_factory`) accumulates and averages."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import torch
from blake3 import blake3

from shoal.averaging.control import StepControl
from shoal.optim.grad_averager import GradientAverager, GradientAveragerFactory
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected

log = logging.getLogger(__name__)


class AveragerGradients:
    """Stands where `GradientBuffers` do. The averager has rounds of its own, before those of the run, which then
    average no gradients. A parameter that got no gradient counts as one with zeros.

    Its rounds wait for all members that are known, so it is not among them while a state is to be
    downloaded (`enter`, `leave`). An average that was had is kept until the step that uses it, however often the end of
    the epoch is tried meanwhile: what this peer accumulates after that is not in it, and dropped.

    Args:
        me: this peer's key.
        factory: makes the averager: called with the parameters, `start=False` and `options`.
        parameters: those that get gradients.

    Raises ValueError if it makes something else than a `GradientAverager`.
    """

    def __init__(
        self, me: bytes, factory: GradientAveragerFactory, parameters: Sequence[torch.Tensor], **options: Any
    ) -> None:
        averager = factory(parameters, start=False, **options)
        if not isinstance(averager, GradientAverager):
            raise ValueError(f"grad_averager_factory made a {type(averager).__name__}: make a shoal.GradientAverager")
        self.averager = averager
        averager.in_step = True
        self._me = me
        self._control: StepControl | None = None  # of the round whose average is not used yet
        self._samples = 0.0  # that this peer brought to it
        self._failed = False

    @property
    def terms(self) -> str:
        """What must be equal at all peers."""
        own = ", ".join(f"{name} {value}" for name, value in sorted(self.averager.agreed_options().items()))
        return f"{type(self.averager).__name__} ({own})"

    @property
    def samples(self) -> float:
        """Behind what is accumulated."""
        return self.averager.local_samples_accumulated

    @property
    def held(self) -> bool:
        """Whether a round was begun whose average is not used yet."""
        return self._control is not None and not self._failed

    def accumulate(self, batch_size: int) -> None:
        """Take the parameters' `.grad`, the mean over `batch_size` samples."""
        self.averager.accumulate_grads_(batch_size)

    def reset(self) -> None:
        """Drop what was accumulated."""
        self.averager.reset_accumulated_grads_()

    def close(self, scale: float = 1.0) -> float:
        """Begin the averager's round with what was accumulated, unless one was held in this epoch, or the others' began
        without this peer; returns how many samples are behind what this peer brings: none if an element is not finite.

        Args:
            scale: by which the gradients in `.grad` are too large.
        """
        if self.held:
            return self._samples
        averager = self.averager
        if not averager.is_finite():
            averager.reset_accumulated_grads_()
        self._samples, self._failed = self.samples, False
        scaled = [p.grad for p in averager.parameters if p.grad is not None] if scale != 1.0 else []
        if scaled:
            torch._foreach_div_(scaled, scale)
        if averager.is_alive():
            self._control = averager.step(reset_accumulators=False, wait=False)
        else:
            self._control = None
            averager.load_accumulators_into_averager_()
        if scaled:
            torch._foreach_mul_(scaled, scale)  # should the round fail, more is added to them
        return self._samples

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Wait for that round; where it fails, the average is this peer's own. Returns a name of the average, which is
        that of all who have the same.

        Args:
            timeout: seconds without any progress.
            over: makes what is done when the others have ended the epoch. The averager's rounds know no epochs: these
                gradients would be averaged with the next one's.

        Raises Behind if so, Rejected if the others have another averager.
        """
        own = blake3(b"own gradients of " + self._me).digest()
        if self._control is None or self._failed:
            return own
        ended: Future[None] | None = None
        try:
            ended = over()
            either: list[Future[Any]] = [self._control, ended]
            until = time.monotonic() + timeout
            while time.monotonic() < until and not wait(either, until - time.monotonic(), FIRST_COMPLETED).done:
                until = max(until, self.averager.got_on_at + timeout)
            if not self._control.done() and ended.done() and not ended.cancelled():
                self._control.cancel()
                raise Behind("the others have ended the epoch before this peer's gradients were there")
            self._control.result(0.0)
        except (Rejected, Behind):
            raise
        except (AveragingError, TimeoutError, CancelledError) as error:
            self._control.cancel()
            self._failed = True
            log.warning("the gradients were not averaged (%s): going on with this peer's own", error)
            return own
        finally:
            if ended is not None:
                ended.cancel()
        assert self.averager.last_round is not None
        return bytes.fromhex(self.averager.last_round.digest)

    def enter(self, called: Callable[[], bool]) -> None:
        """From now on the others wait for this peer's gradients.

        Args:
            called: whether the end of the epoch has begun: then their round may have begun as well. They would wait for
                this peer in the run's round, and it for them in that which follows on theirs.
        """
        if not self.averager.is_alive() and not called():
            self.averager.run_in_background()
            if called():
                self.averager.shutdown()

    def leave(self) -> None:
        """Nobody is to wait for this peer's gradients, which are of a state that it leaves."""
        self.averager.shutdown()  # which ends its round
        self._control = None

    def use_local(self) -> None:
        """There was no round of the run: what the averager has is the best there is."""

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], max_norm: float | None = None) -> Iterator[None]:
        """As of `GradientBuffers`."""
        before = [target.grad for target in targets]
        with self.averager.get_tensors() as averaged:
            gradients = [tensor.to(target, copy=True) for tensor, target in zip(averaged, targets, strict=True)]
        self.averager.notify_used_averaged_gradients()
        self._control = None
        if max_norm is not None:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() for gradient in gradients]
            factor = max_norm / (float(torch.stack(norms).square().sum().sqrt()) + 1e-6)
            if factor < 1.0:
                torch._foreach_mul_(gradients, factor)
        try:
            for target, gradient in zip(targets, gradients, strict=True):
                target.grad = gradient
            yield
        finally:
            for target, given in zip(targets, before, strict=True):
                target.grad = given
