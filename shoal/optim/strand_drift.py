"""The drift of a cluster whose ranks carry strands. Each rank makes inner steps with its part of the model, and brings
the drift of its strands to their rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.averaging.exchange import Vector
from shoal.cluster.strands import Strands
from shoal.optim._torch import foreach_mul_
from shoal.optim.closures import Closure
from shoal.optim.crew import Crew
from shoal.optim.drift import Drift
from shoal.optim.settings import Settings, Stepped
from shoal.optim.strand_averager import StrandAverager
from shoal.optim.strand_rounds import Strand, StrandRounds

MakeAverager = Callable[[Vector, int, int], StrandAverager]
"""Makes the averager of a vector, given its fragment and its strand."""


class StrandDrift(StrandRounds, Drift):
    """The drift of the strands that this rank carries. At rank 0, `Epoch` uses it as the drift of the whole cluster,
    and each call is made at all ranks.

    The inner optimizer steps the parameters of the model that this rank has, whole or sharded. For `Drift`, the model
    is the pieces of `strands`. They are gathered from the model before the drift is taken. When they change, they are
    spread to the model.

    Args:
        settings: the settings of the optimizer.
        inner: the optimizer of the model's own parameters.
        model: the trained pieces of this rank.
        anchors: the anchor of each piece.
        outer: the optimizer of the anchors.
        turns: for each fragment and each strand of this rank, the numbers of its pieces.
        make_averager: see `MakeAverager`.
        strands: the pieces.
        crew: see `StrandRounds`.

    Attributes:
        schema: which parameters of the model are averaged together, as bytes that peers compare.
    """

    def __init__(
        self,
        settings: Settings,
        inner: Stepped,
        model: Sequence[Tensor],
        anchors: Sequence[Tensor],
        outer: torch.optim.Optimizer,
        *,
        turns: Sequence[Sequence[Sequence[int]]],
        make_averager: MakeAverager,
        strands: Strands,
        crew: Crew,
    ) -> None:
        assert settings.outer is not None
        StrandRounds.__init__(self, strands.carriers, crew, settings.max_grad_norm)
        codec, feedback = settings.grad_compression, settings.error_feedback
        parts = inner.optimizer, inner.scheduler, model, anchors, outer
        Drift.__init__(self, settings.outer, *parts, codec, feedback, turns=turns)
        self.schema = b""
        self._pieces = strands
        self._is_gathered = False  # whether the pieces equal the model
        self._quiet = 0  # over 0 while the other ranks need not be told what this rank does
        self._strands: list[list[Strand]] = []
        for fragment, places in enumerate(self._turns):
            made = []
            for place, strand in zip(places, strands.mine, strict=True):
                averager = make_averager(self.vectors[place], fragment, strand)
                made.append(Strand(self.vectors[place], averager, len(self.fragments[place])))
            self._strands.append(made)

    @property
    def averagers(self) -> list[StrandAverager]:
        """See `StrandRounds`."""
        return [strand.averager for made in self._strands for strand in made]

    @property
    def is_quiet(self) -> bool:
        """Whether the other ranks do the same by themselves, so that rank 0 need not tell them."""
        return self._quiet > 0

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within this context, `is_quiet` is true."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextlib.contextmanager
    def _at_all(self, what: str, *given: Any) -> Iterator[None]:
        if not self.is_quiet:
            self._crew.tell(what, *given)
        with self.quiet():
            yield

    # -- the methods of `Drift`, at all ranks

    def accumulate(self, batch_size: float, closure: Closure | None = None) -> None:
        """See `Drift`. `batch_size` is the number of samples of the whole cluster, and `closure` has its loss."""
        if not self.is_quiet:
            self._crew.tell_quietly("accumulate", batch_size, None if closure is None else closure.returned)
        with self.quiet():
            if self._pieces.is_ahead:
                self._pieces.spread(())
            super().accumulate(batch_size, closure)
            self._is_gathered = False

    def begin(self, epoch: int) -> None:
        """See `Drift`."""
        with self._at_all("begin epoch", epoch):
            super().begin(epoch)

    def go_on(self) -> None:
        """See `Drift`."""
        with self._at_all("go on accumulating"):
            super().go_on()

    def take_back(self) -> None:
        """See `Drift`."""
        with self._at_all("take back"):
            super().take_back()

    def reset(self) -> None:
        """See `Drift`."""
        with self._at_all("reset"):
            super().reset()

    def remember(self, anchors: list[Tensor] | None = None) -> None:
        """See `Drift`."""
        with self._at_all("remember"):
            super().remember(anchors)

    def publish(self) -> None:
        """See `Drift`."""
        with self._at_all("publish drift"):
            self.gather()
            super().publish()
            self._pieces.is_ahead = True

    def apply(self, *, used: bool) -> None:
        """See `Drift`."""
        with self._at_all("apply", used):
            self.gather()
            super().apply(used=used)
            self._pieces.is_ahead = True

    def gather(self) -> None:
        """Gather the pieces from the model, if there were inner steps since. All ranks call this at once."""
        if not self._is_gathered:
            self._pieces.gather_parameters()
            self._is_gathered = True

    def gather_anew(self) -> None:
        """Gather the pieces, even if there were no inner steps since, because the user may have written. All ranks call
        this at once."""
        self._is_gathered = self._pieces.is_ahead
        self.gather()

    # -- into rounds and out of them

    def close(self, scale: float = 1.0) -> float:
        """Take the drift, and begin the rounds of all strands with it, unless this epoch has had them.

        Returns:
            The number of samples behind the cluster's drift; 0 if an element is not finite at any rank.
        """
        if self.held:
            return self._brought_to_rounds
        self._crew.tell("close")
        are_finite = all([self.close_here(), *self._crew.hear()])
        self._crew.tell("begin", are_finite)
        self.begin_rounds(are_finite)
        return self._brought_to_rounds

    def close_here(self) -> bool:
        """Take the drift of this rank's strands. Returns whether it is finite."""
        self.gather()
        return self.take()

    def begin_rounds(self, are_finite: bool) -> None:
        """Begin the rounds of this rank. If the drift of any rank is not finite, go back to the anchor before."""
        if not are_finite:
            with self.quiet():
                self.go_back()
        self.begin_here(self._strands[self._epoch % len(self._strands)], self.samples)

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[Tensor], max_norm: float | None = None) -> Iterator[float | None]:
        """See `Drift`. Here the average is scaled down by the factor that rank 0 has sent."""
        with Drift.as_grad(self, targets):
            if self._factor < 1.0:
                foreach_mul_([target.grad for target in targets if target.grad is not None], self._factor)
            self._controls = None
            yield self._norm
