"""Gradients of an epoch: averaged over this peer's steps in flat memory, and over all peers when they come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from shoal.averaging.contribution import Fault, SendTo
from shoal.averaging.exchange import Exchange
from shoal.averaging.messages import Begin
from shoal.compression import Compression, TensorRole
from shoal.flat import FlatBuffer, Layout


class GradientBuffers:
    """The mean of this peer's gradients in an epoch, weighted by samples, and the average of all peers'.

    The vector that is averaged has one more tensor: per parameter, whether it got a gradient at all. A parameter that
    got none from any peer has no `.grad` in the step, as it would have in one process: neither momentum nor weight
    decay moves it.

    Args:
        parameters: those that get gradients.
        compression: how gradients travel; the flags always exactly.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], compression: Compression) -> None:
        self.parameters = list(parameters)
        self.samples = 0.0
        self._seen: set[int] = set()  # which parameters have got a gradient
        on_host = all(parameter.device.type == "cpu" for parameter in self.parameters)
        flags = torch.zeros(len(self.parameters))
        self.layout = Layout.of([*self.parameters, flags]).on("cpu")
        self._codecs = compression.plan(self.layout, TensorRole.GRADIENT, exact=[len(self.parameters)])
        self._mine = FlatBuffer(self.layout)
        self._averaged = FlatBuffer(self.layout)
        *self._mean, self._used = self._mine.views()
        *_, self._used_by_any = self._averaged.views()
        # Where gradients are accumulated: beside the parameters; on the host that is what is sent.
        self._means = self._mean if on_host else FlatBuffer(Layout.of(self.parameters)).views()

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Take the parameters' `.grad`, the mean over `batch_size` samples, into the mean of the epoch. A parameter
        without a gradient counts as one with zeros."""
        self.samples += batch_size
        share = batch_size / self.samples
        means, gradients, unused = [], [], []
        for index, (mean, parameter) in enumerate(zip(self._means, self.parameters, strict=True)):
            if parameter.grad is None:
                unused.append(mean)
            else:
                means.append(mean)
                gradients.append(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                self._seen.add(index)
        # The first gradient of an epoch has share 1, and is taken over bit for bit.
        if means:
            torch._foreach_lerp_(means, gradients, share)
        if unused:
            torch._foreach_mul_(unused, 1.0 - share)

    def reset(self) -> None:
        """Begin an epoch."""
        for mean in self._means:
            mean.zero_()
        self._seen.clear()
        self.samples = 0.0

    def finish(self) -> None:
        """Bring what is sent to the host."""
        self._used.copy_(torch.tensor([float(index in self._seen) for index in range(len(self.parameters))]))
        if self._means is not self._mean:
            for host, mean in zip(self._mean, self._means, strict=True):
                host.copy_(mean)

    def is_finite(self) -> bool:
        """Whether no element of the mean is NaN or infinite; `finish` comes first."""
        return all(bool(flat.isfinite().all()) for flat in self._mine.flat)

    def open(self, me: bytes, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """The exchange of a round of these gradients."""
        return Exchange.of(me, begin, self._mine.flat, self._averaged.flat, self._codecs, send, fault)

    def use_local(self) -> None:
        """Take this peer's own mean for the average: there was no round."""
        for averaged, mine in zip(self._averaged.flat, self._mine.flat, strict=True):
            averaged.copy_(mine)

    @contextlib.contextmanager
    def as_grad(self) -> Iterator[None]:
        """Within, the parameters' `.grad` are a copy of the average, which hooks and kernels may change; the average
        itself is still asked for by those who missed the round. Afterwards `.grad` are what they were."""
        before = [parameter.grad for parameter in self.parameters]
        used = self._used_by_any.tolist()
        for mine, averaged in zip(self._mine.flat, self._averaged.flat, strict=True):
            mine.copy_(averaged)
        try:
            for parameter, average, weight in zip(self.parameters, self._mean, used, strict=True):
                parameter.grad = average.to(parameter.device) if weight > 0 else None
            yield
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
