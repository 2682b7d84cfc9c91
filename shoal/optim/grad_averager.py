"""Gradients that a user accumulates and averages by hand, without a `shoal.Optimizer`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Gathered, StepControl
from shoal.compression import CompressionInfo, TensorRole
from shoal.dht.dht import DHT
from shoal.flat import FlatBuffer, Layout, is_finite
from shoal.optim.gradients import HeldGradients, lost_gradient
from shoal.swarm.protocol.errors import AveragingError

log = logging.getLogger(__name__)


class GradientAverager(DecentralizedAverager):
    """Accumulates the gradients of a model over some steps, and averages them with peers, weighted by samples.

    >>> averager = shoal.GradientAverager(model.parameters(), dht=dht, prefix="experiment", start=True)
    >>> for number, batch in enumerate(data, start=1):
    ...     loss(model, batch).backward()
    ...     averager.accumulate_grads_(batch_size=len(batch))
    ...     model.zero_grad()
    ...     if number % 16 == 0:
    ...         averager.step()
    ...         with averager.use_averaged_gradients():
    ...             optimizer.step()

    There are up to three sets of gradients: those in `.grad`; the accumulated ones, in flat memory beside the
    parameters; the averaged ones, in flat memory on the host.

    Args:
        parameters: of the model; those that get no gradient count as having one of zeros.
        dht, prefix: see `DecentralizedAverager`.
        reuse_grad_buffers: accumulate in `.grad` itself: the user must not clear it (`zero_grad`) or change it. Saves
            memory. Gradients of batches of different sizes then count alike.
        accumulate_grads_on: the device of the accumulated gradients; by default that of each parameter.
        client_mode: see `DecentralizedAverager`.
        warn: log a warning when averaged gradients were not used before the next step, or accumulated ones not reset.
        averaged_grads: memory for the averaged gradients: one tensor for each parameter, of its shape.
        kwargs: of `DecentralizedAverager`.

    Attributes:
        parameters, reuse_grad_buffers, warn: as given.
        local_samples_accumulated, local_times_accumulated: samples and calls of `accumulate_grads_` since the last
            reset.

    Raises ValueError if `averaged_grads` do not fit the parameters, and as `DecentralizedAverager`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        self.parameters = tuple(parameters)
        self._held = HeldGradients(self.parameters)
        self.reuse_grad_buffers, self.warn = reuse_grad_buffers, warn
        self.local_samples_accumulated = self.local_times_accumulated = 0
        if reuse_grad_buffers and accumulate_grads_on is not None:
            raise ValueError("accumulate_grads_on= has no meaning with reuse_grad_buffers=True, which has .grad only")
        self._accumulated: FlatBuffer | None = None
        if not reuse_grad_buffers:
            layout = Layout.of(self.parameters)
            self._accumulated = FlatBuffer(layout if accumulate_grads_on is None else layout.on(accumulate_grads_on))
            self._accumulators = self._accumulated.views()
        self._anchor_batch_size: int | None = None  # of the first batch: the others weigh in proportion
        self._used_in_step = self._unused_result = False
        if not averaged_grads:
            averaged_grads = [torch.zeros_like(p, device="cpu", requires_grad=False) for p in self.parameters]
        shapes, given = [tuple(p.shape) for p in self.parameters], [tuple(grad.shape) for grad in averaged_grads]
        if shapes != given:
            raise ValueError(f"averaged_grads have shapes {given}; the parameters' are {shapes}")
        kwargs.setdefault(
            "tensor_infos",
            [CompressionInfo.from_tensor(g, key, TensorRole.GRADIENT) for key, g in enumerate(averaged_grads)],
        )
        super().__init__(averaged_grads, dht, prefix=prefix, client_mode=client_mode, **kwargs)

    # -- accumulating

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        """The accumulated gradients, summed."""
        if self.reuse_grad_buffers:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield parameter.grad
        else:
            yield from self._accumulators

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the parameters' `.grad`, the mean over `batch_size` samples, to the accumulated gradients. (With
        `reuse_grad_buffers` autograd has done so; it is only counted.) Raises ValueError for a batch without samples,
        and if gradients that are accumulated in `.grad` were cleared since.
        """
        if not batch_size > 0:
            raise ValueError(f"batch_size={batch_size!r}: give the number of samples behind the gradients, at least 1")
        self._check_held()
        if self._used_in_step and self.warn:
            log.warning("accumulated gradients were averaged and not reset: these are added to them")
            self._used_in_step = False
        if self._anchor_batch_size is None:
            self._anchor_batch_size = batch_size
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        if self.reuse_grad_buffers:
            self._held.hold()
            return
        sums, gradients = [], []
        for accumulator, parameter in zip(self._accumulators, self.parameters, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                sums.append(accumulator)
                gradients.append(gradient.to(accumulator.device))
        if sums:
            torch._foreach_add_(sums, gradients, alpha=batch_size / self._anchor_batch_size)

    def _check_held(self) -> None:
        if (index := self._held.lost()) is not None:
            self.reset_accumulated_grads_()
            raise lost_gradient(f"parameter {index}")

    def is_finite(self) -> bool:
        """Whether no element of the accumulated gradients is NaN or infinite."""
        return all(is_finite(gradient) for gradient in self._grad_accumulators())

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Write the mean of the accumulated gradients where the next round reads it. Raises ValueError if some that are
        accumulated in `.grad` were cleared."""
        self._check_held()
        with self.get_tensors() as averaged:
            self._load_accumulators(averaged)

    def _load_accumulators(self, averaged: Sequence[torch.Tensor]) -> None:
        # Without .grad's own weights, batches count by size: each gradient is a mean over its batch.
        count: float = self.local_times_accumulated
        if not self.reuse_grad_buffers and self._anchor_batch_size is not None:
            count = self.local_samples_accumulated / self._anchor_batch_size
        torch._foreach_copy_(list(averaged), list(self._grad_accumulators()))
        torch._foreach_mul_(list(averaged), 1.0 / count if count else 0.0)

    @torch.no_grad()
    def reset_accumulated_grads_(self) -> None:
        """Begin anew: no gradients, no samples. With `reuse_grad_buffers` this clears `.grad`."""
        self._used_in_step = False
        self._held.release()
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None
        if self._accumulated is not None:
            for flat in self._accumulated.flat:
                flat.zero_()
        else:
            torch._foreach_zero_(list(self._grad_accumulators()))

    # -- averaging

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now, for a round that begins when `step(control=…)` is called.

        Args:
            scheduled_time: when that will be, in seconds of `get_dht_time()`.
            kwargs: of `DecentralizedAverager.step`, but `weight`, which is known only then.
        """
        if kwargs.get("weight") is not None:
            raise ValueError("weight= is set by step(control=…, weight=…): it is not known when a step is scheduled")
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        assert isinstance(control, StepControl)
        return control

    @overload  # type: ignore[override]
    def step(
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: Literal[True] = True,
        **kwargs: Any,
    ) -> Gathered: ...
    @overload
    def step(
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        *,
        wait: Literal[False],
        **kwargs: Any,
    ) -> StepControl: ...
    def step(
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> Gathered | StepControl:
        """Average the accumulated gradients with peers; the result is had by `use_averaged_gradients`.

        If the round fails, the averaged gradients are this peer's own.

        Args:
            weight: of this peer's gradients; its accumulated samples by default.
            reset_accumulators: begin anew as soon as the gradients are on their way.
            control: of `schedule_step`; without it, a group is looked for now.
            timeout: seconds to wait for the result.
            wait: return what the group gathered; if False, the control.
            kwargs: of `DecentralizedAverager.step`; not with a `control`, which was given them.

        Raises AveragingError if there is no result, ValueError for a control that was used.
        """
        if control is None:
            control = self.schedule_step(timeout=timeout, **kwargs)
        elif kwargs:
            raise ValueError(f"{', '.join(kwargs)}: the control was made without; give that to schedule_step")
        if control.triggered:
            raise ValueError("this control was used, or its step is over: schedule another")
        if self._unused_result and self.warn:
            log.warning("gradients are averaged again, and the last result was not used")
        if not self.auxiliary:
            control.weight = self.local_samples_accumulated if weight is None else weight
        try:
            self.load_accumulators_into_averager_()
        except BaseException:  # Ctrl-C too: nobody would allow the round, and the others would wait in it
            control.cancel()
            raise
        self._used_in_step, self._unused_result = True, True
        if reset_accumulators:
            self.reset_accumulated_grads_()
        control.allow_allreduce()
        if not wait:
            return control
        try:
            return control.result(timeout)
        except TimeoutError:
            control.cancel()
            raise AveragingError(f"no result within {timeout:.3g} s") from None

    @property
    def has_averaged_gradients(self) -> bool:
        """Whether a step was made whose result was not used yet."""
        return self._unused_result

    def notify_used_averaged_gradients(self) -> None:
        """Say that the result of the last step was used, by other means than `use_averaged_gradients`."""
        self._unused_result = False

    @contextlib.contextmanager
    def use_averaged_gradients(self) -> Iterator[Sequence[torch.Tensor]]:
        """Within, the parameters' `.grad` are the averaged gradients, in the order of the parameters; afterwards what
        they were."""
        self._unused_result = False
        before = [parameter.grad for parameter in self.parameters]
        with self.get_tensors() as averaged:
            try:
                for parameter, average in zip(self.parameters, averaged, strict=True):
                    parameter.grad = average.to(parameter)
                yield averaged
            finally:
                for parameter, gradient in zip(self.parameters, before, strict=True):
                    parameter.grad = gradient

    # -- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """What is carried from one step to the next, plain data and tensors: here nothing. What was accumulated since
        the last step is not in it. `shoal.Optimizer` saves it with its own state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; from {} as if no step had been made. Raises ValueError, and changes
        nothing, if it is another averager's."""
        if state_dict:
            raise ValueError(f"{type(self).__name__} carries nothing on, and was given {', '.join(state_dict)}")


GradientAveragerFactory = Callable[..., GradientAverager]
"""What `shoal.Optimizer` takes as `grad_averager_factory`."""
