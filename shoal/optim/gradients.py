"""Gradients of an epoch: accumulated flat, and flat again when they come back averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from shoal.averaging.contribution import Fault, SendTo
from shoal.averaging.exchange import Exchange
from shoal.averaging.messages import Begin
from shoal.compression import Codec
from shoal.flat import FlatBuffer, Layout


class GradientBuffers:
    """The sum of this peer's gradients in an epoch, weighted by samples, and the average of all peers'.

    Args:
        parameters: those that get gradients.
        codec: how gradients travel.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], codec: Codec) -> None:
        self.parameters = list(parameters)
        self.samples = 0.0
        self.layout = Layout.of(self.parameters).on("cpu")
        self._codec = codec
        self._sums = FlatBuffer(Layout.of(self.parameters))
        self._sum_views = self._sums.views()
        self._averaged = FlatBuffer(self.layout)
        on_host = all(spec.device.type == "cpu" for spec in self._sums.layout.buffers)
        self._host = self._sums if on_host else FlatBuffer(self.layout)

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Add the parameters' `.grad`, the mean over `batch_size` samples, to the sum; without a gradient, nothing."""
        pairs = [(s, p.grad) for s, p in zip(self._sum_views, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            sums, gradients = zip(*pairs, strict=True)
            torch._foreach_add_(sums, gradients, alpha=batch_size)
        self.samples += batch_size

    def finish(self) -> None:
        """No more is added in this epoch: turn the sum into the mean, on the host."""
        for flat in self._sums.flat:
            flat.mul_(1.0 / self.samples if self.samples else 0.0)
        if self._host is not self._sums:
            for host, flat in zip(self._host.flat, self._sums.flat, strict=True):
                host.copy_(flat)

    def reset(self) -> None:
        """Begin an epoch."""
        for flat in self._sums.flat:
            flat.zero_()
        self.samples = 0.0

    def is_finite(self) -> bool:
        """Whether no element of the mean is NaN or infinite."""
        return all(bool(flat.isfinite().all()) for flat in self._host.flat)

    def open(self, me: bytes, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """The exchange of a round of these gradients."""
        return Exchange.of(me, begin, self._host.flat, self._averaged.flat, self._codec, send, fault)

    def use_local(self) -> None:
        """Take this peer's own mean for the average: there was no round."""
        for averaged, host in zip(self._averaged.flat, self._host.flat, strict=True):
            averaged.copy_(host)

    @contextlib.contextmanager
    def as_grad(self) -> Iterator[None]:
        """Within, the parameters' `.grad` are the average; afterwards they are what they were."""
        before = [parameter.grad for parameter in self.parameters]
        try:
            for parameter, view in zip(self.parameters, self._averaged.views(), strict=True):
                parameter.grad = view.to(parameter.device)
            yield
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
