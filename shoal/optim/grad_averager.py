"""Averages gradients in rounds of their own: for a user without a `shoal.Optimizer`, or for an `Optimizer` with a
`grad_averager_factory`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Gathered, StepControl
from shoal.averaging.exchange import Vector
from shoal.compression import CompressionInfo, TensorRole
from shoal.dht.dht import DHT
from shoal.flat import FlatBuffer, Layout, is_finite, neutral, neutral_modes
from shoal.interrupts import holding, result_of
from shoal.optim._torch import foreach_copy_, foreach_div_, foreach_mul_, foreach_zero_
from shoal.optim.accumulator import Accumulator, in_grad, lost_gradient
from shoal.optim.settings import BATCH, SAMPLES, whole
from shoal.optim.trainable import check_real, check_writable
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

    There are up to three sets of gradients: those in `.grad`; the accumulated gradients, in flat memory on the
    parameters' devices; the averaged gradients, in flat memory on the host.

    Args:
        parameters: the parameters of the model, of floating point. A parameter without a gradient counts as one with
            zeros.
        dht: this peer's place in the DHT, started.
        prefix: the name of the run: averagers with the same prefix meet.
        reuse_grad_buffers: accumulate in `.grad` itself, which saves memory. You must not clear (`zero_grad`) or change
            `.grad` then. All batches have the same weight, whatever their size.
        accumulate_grads_on: the device of the accumulated gradients. By default each is on its parameter's device.
        client_mode: this peer does not listen for connections and reduces nothing. As the DHT when None.
        warn: log a warning if averaged gradients were not used before the next step, or if accumulated gradients were
            averaged and not reset.
        averaged_grads: memory for the averaged gradients: one tensor for each parameter, of its shape. By default new
            tensors on the CPU, of the parameters' dtypes.
        kwargs: the other arguments of `DecentralizedAverager`.

    Attributes:
        parameters: as given, as a tuple.
        reuse_grad_buffers: as given.
        warn: as given.

    Raises:
        ValueError: if a parameter is complex or was made within `torch.inference_mode()`, if `averaged_grads` do not
            fit the parameters, if `accumulate_grads_on` is given with `reuse_grad_buffers`, and as
            `DecentralizedAverager`.
    """

    @holding
    @neutral
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
        check_real(self.parameters)
        check_writable(self.parameters)
        self.reuse_grad_buffers, self.warn = reuse_grad_buffers, warn
        if reuse_grad_buffers and accumulate_grads_on is not None:
            raise ValueError("accumulate_grads_on= has no meaning with reuse_grad_buffers=True, which has .grad only")
        layout = Layout.of(self.parameters)
        layout = layout if accumulate_grads_on is None else layout.on(accumulate_grads_on)
        memory = None if reuse_grad_buffers else FlatBuffer(layout).views()
        self._accumulator = Accumulator(self.parameters, memory, keeps_mean=False)
        self._used_in_step = self._unused_result = False
        if not averaged_grads:
            averaged_grads = [torch.zeros_like(p, device="cpu", requires_grad=False) for p in self.parameters]
        shapes, given = [tuple(p.shape) for p in self.parameters], [tuple(grad.shape) for grad in averaged_grads]
        if shapes != given:
            raise ValueError(f"averaged_grads have shapes {given}; the parameters' are {shapes}")
        infos = [CompressionInfo.from_tensor(g, key, TensorRole.GRADIENT) for key, g in enumerate(averaged_grads)]
        kwargs.setdefault("tensor_infos", infos)
        super().__init__(averaged_grads, dht, prefix=prefix, client_mode=client_mode, **kwargs)

    # -- accumulating

    @property
    def local_samples_accumulated(self) -> float:
        """The number of samples since the last reset; an int if it is whole. A subclass that accumulates in another way
        may set this and `local_times_accumulated`."""
        return self._accumulator.samples

    @local_samples_accumulated.setter
    def local_samples_accumulated(self, samples: float) -> None:
        self._accumulator.samples = whole(SAMPLES.check("local_samples_accumulated", samples))

    @property
    def local_times_accumulated(self) -> int:
        """The number of calls of `accumulate_grads_` since the last reset."""
        return self._accumulator.steps

    @local_times_accumulated.setter
    def local_times_accumulated(self, steps: int) -> None:
        self._accumulator.steps = steps

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        """The sums of the accumulated gradients. In `.grad`, missing ones become zeros, and sparse ones dense: autograd
        adds sparse gradients to these, too."""
        if self._accumulator.memory is not None:
            yield from self._accumulator.memory
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            yield parameter.grad

    @holding
    @neutral
    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the parameters' `.grad` to the accumulated gradients. With `reuse_grad_buffers`, autograd has added them
        already, and this call only counts the batch.

        Args:
            batch_size: the number of samples over which `.grad` is the mean, over 0.

        Raises:
            ValueError: for another number of samples, or if gradients that are accumulated in `.grad` were cleared.
        """
        samples = whole(BATCH.check("batch_size", batch_size))
        self._check_held()
        if self._used_in_step and self.warn:
            log.warning("accumulated gradients were averaged and not reset: new gradients are added to them")
            self._used_in_step = False
        self._accumulator.add(samples)

    def _check_held(self) -> None:
        if (index := self._accumulator.lost()) is not None:
            self.reset_accumulated_grads_()
            raise lost_gradient(f"parameter {index}")

    def is_finite(self) -> bool:
        """Whether no element of the accumulated gradients is NaN or infinite."""
        return all(is_finite(gradient) for gradient in self._grad_accumulators())

    @holding
    @neutral
    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Write the mean of the accumulated gradients where the next round reads it.

        Raises:
            ValueError: if gradients that are accumulated in `.grad` were cleared.
        """
        self._check_held()
        with self.get_tensors() as averaged:
            # Where autograd does not sum them, batches count by size: each gradient is a mean over its batch.
            count = self._accumulator.batches
            foreach_copy_(list(averaged), list(self._grad_accumulators()))
            foreach_mul_(list(averaged), 1.0 / count if count else 0.0)

    @holding
    @neutral
    @torch.no_grad()
    def reset_accumulated_grads_(self) -> None:
        """Drop the accumulated gradients and the count of samples. With `reuse_grad_buffers` this sets `.grad` to
        zeros."""
        self._used_in_step = False
        self._accumulator.reset()
        if self.reuse_grad_buffers:
            foreach_zero_(list(self._grad_accumulators()))

    # -- averaging

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now, for a round that begins when `step(control=…)` is called.

        Args:
            scheduled_time: the time of that call, in seconds of `get_dht_time()`.
            kwargs: arguments of `DecentralizedAverager.step`. Not `weight`, which only the later call of `step` knows.

        Returns:
            The control to give to `step`.

        Raises:
            ValueError: if `weight` is given.
        """
        if kwargs.get("weight") is not None:
            raise ValueError("weight= is set by step(control=…, weight=…): it is not known when a step is scheduled")
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        assert isinstance(control, StepControl)
        return control

    @overload  # type: ignore[override]
    def step(self, weight: float | None = None, *, wait: Literal[False], **kwargs: Any) -> StepControl: ...
    @overload
    def step(self, *args: Any, **kwargs: Any) -> Gathered: ...
    @holding
    def step(
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> Gathered | StepControl:
        """Average the accumulated gradients with peers. `use_averaged_gradients` gives the result.

        If the round fails, the averaged gradients are this peer's own.

        Args:
            weight: the weight of this peer's gradients in the mean. By default the number of its accumulated samples.
            reset_accumulators: drop the accumulated gradients as soon as they are copied for the round.
            control: from `schedule_step`. Without it, the averager looks for a group now.
            timeout: the longest time in seconds to wait for the result.
            wait: wait for the round. If False, return at once.
            kwargs: arguments of `DecentralizedAverager.step`. With a `control`, give them to `schedule_step` instead.

        Returns:
            What each member of the group gave as `gather`, by peer id. With `wait=False`, the control, which is a
            future of this.

        Raises:
            AveragingError: if there is no result.
            ValueError: for a control that was used, for other arguments beside a control, or if gradients that are
                accumulated in `.grad` were cleared.
        """
        if control is None:
            control = self.schedule_step(timeout=timeout, **kwargs)
        elif kwargs:
            raise ValueError(f"{', '.join(kwargs)}: the control was made without that; give it to schedule_step")
        if control.triggered:
            raise ValueError("this control was used, or its step is over: schedule another")
        if self._unused_result and self.warn:
            log.warning("gradients are averaged again, and the last result was not used")
        if not self.auxiliary:
            control.weight = self.local_samples_accumulated if weight is None else weight
        try:
            self.load_accumulators_into_averager_()
        except BaseException:  # Ctrl-C too: the others would wait in a round that nobody allows to begin
            control.cancel()
            raise
        self._used_in_step, self._unused_result = True, True
        if reset_accumulators:
            self.reset_accumulated_grads_()
        control.allow_allreduce()
        if not wait:
            return control
        try:
            return result_of(control, timeout)
        except TimeoutError:
            control.cancel()
            raise AveragingError(f"no result within {timeout:.3g} s") from None

    @property
    def has_averaged_gradients(self) -> bool:
        """Whether the last step has a result that nobody has used yet."""
        return self._unused_result

    def notify_used_averaged_gradients(self) -> None:
        """Note that you have used the result of the last step without `use_averaged_gradients`."""
        self._unused_result = False

    @contextlib.contextmanager
    def use_averaged_gradients(self) -> Iterator[Sequence[torch.Tensor]]:
        """Within this context, the parameters' `.grad` are the averaged gradients. Afterwards they are what they were.

        Yields:
            The averaged gradients in the order of the parameters, in the memory of the averager.
        """
        self._unused_result = False
        with self.get_tensors() as averaged:
            with neutral_modes():
                mine = [average.to(parameter) for average, parameter in zip(averaged, self.parameters, strict=True)]
            with in_grad(self.parameters, mine):
                yield averaged

    # -- saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """What this averager carries from one step to the next, as plain data and tensors: here nothing. The dict has
        no gradients that were accumulated since the last step. `shoal.Optimizer` saves it with its own state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; with {}, as if no step had been made.

        Args:
            state_dict: from an averager of the same class. It is copied.

        Raises:
            ValueError: if it is from another class of averager. Then nothing has changed.
        """
        if state_dict:
            raise ValueError(f"{type(self).__name__} carries nothing on, and was given {', '.join(state_dict)}")


GradientAveragerFactory = Callable[..., GradientAverager]
"""What `shoal.Optimizer` takes as `grad_averager_factory`."""


class AveragerSum:
    """The gradients of an `Optimizer` that accumulate in the user's averager. It stands in for `EpochGradients`.

    A parameter without a gradient counts as one with zeros.

    Args:
        factory: makes the averager. It is called with the parameters, `start=False` and `options`.
        parameters: the parameters that get gradients.

    Attributes:
        averager: the averager that the factory made.
        vectors: those of the run's round: none.

    Raises:
        ValueError: if the factory makes anything but a `GradientAverager`.
    """

    vectors: Sequence[Vector] = ()

    def __init__(self, factory: GradientAveragerFactory, parameters: Sequence[torch.Tensor], **options: Any) -> None:
        averager = factory(parameters, start=False, **options)
        if not isinstance(averager, GradientAverager):
            raise ValueError(f"grad_averager_factory made a {type(averager).__name__}: make a shoal.GradientAverager")
        self.averager = averager
        averager.in_step = True
        self._scale = 1.0  # the factor by which the gradients in `.grad` are too large

    @property
    def samples(self) -> float:
        """The number of accumulated samples."""
        return self.averager.local_samples_accumulated

    def lost(self) -> int | None:
        """See `Accumulator.lost`."""
        return self.averager._accumulator.lost()

    def accumulate(self, batch_size: float) -> None:
        """Add the parameters' `.grad`, the mean over `batch_size` samples."""
        self.averager.accumulate_grads_(batch_size)  # type: ignore[arg-type]  # it counts parts of samples, too

    def reset(self) -> None:
        """Drop what was accumulated."""
        self.averager.reset_accumulated_grads_()

    def freeze(self, scale: float = 1.0) -> bool:
        """Note the scale of the gradients. Returns whether all elements are finite."""
        self._scale = scale
        return self.averager.is_finite()

    def drop(self) -> None:
        """Drop what was accumulated."""
        self.reset()

    def begin(self) -> StepControl | None:
        """Begin the averager's round with the accumulated gradients. If the averager is not in its run, because the
        others' round began without this peer, there is no round, and the average is this peer's own mean."""
        averager, scale = self.averager, self._scale
        scaled = [p.grad for p in averager.parameters if p.grad is not None] if scale != 1.0 else []
        if scaled:
            foreach_div_(scaled, scale)
        control = None
        if averager.is_alive():
            control = averager.step(reset_accumulators=False, wait=False)
        else:
            averager.load_accumulators_into_averager_()
        if scaled:
            foreach_mul_(scaled, scale)  # should the round fail, more is added to them
        return control

    @property
    def average(self) -> list[torch.Tensor]:
        """The average of each parameter's gradient, where and as precise as the parameter is."""
        with self.averager.get_tensors() as averaged:
            return [tensor.to(parameter) for tensor, parameter in zip(averaged, self.averager.parameters, strict=True)]

    averages = average

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], factor: float = 1.0) -> Iterator[None]:
        """See `EpochGradients.as_grad`."""
        with self.averager.get_tensors() as averaged:
            gradients = [tensor.to(target, copy=True) for tensor, target in zip(averaged, targets, strict=True)]
        self.averager.notify_used_averaged_gradients()
        if factor < 1.0:
            foreach_mul_(gradients, factor)
        with in_grad(targets, gradients):
            yield
