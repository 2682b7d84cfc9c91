"""The gradients of a cluster whose ranks carry strands: each rank accumulates and averages those of its own strands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from shoal.averaging.control import StepControl
from shoal.optim._torch import foreach_mul_
from shoal.optim.accumulator import EpochGradients
from shoal.optim.crew import Crew
from shoal.optim.exact_norm import norm_of
from shoal.optim.grad_averager import average_of
from shoal.optim.strand_averager import StrandAverager
from shoal.swarm.protocol.errors import AveragingError, Behind


@dataclass(frozen=True, slots=True)
class Strand:
    """What a rank has of one strand.

    Attributes:
        number: of the strand.
        trained: the pieces of parameters that get gradients.
        gradients: of these.
        averager: averages them.
    """

    number: int
    trained: Sequence[torch.Tensor]
    gradients: EpochGradients
    averager: StrandAverager


class StrandGradients:
    """The gradients of the strands that this rank carries. At rank 0, what is done to them is done at all ranks: it is
    what `Epoch` knows as the cluster's gradients.

    The strands have rounds of their own, before that of the run, in which rank 0 names the averages of all of them
    (as with `AveragerGradients`).

    Args:
        strands: those of this rank, in order.
        carriers: which rank has each strand of the run.
        crew: the other ranks.
        max_norm: to which norm the average is scaled down, over all strands.

    Attributes:
        strands: as given.
    """

    def __init__(self, strands: Sequence[Strand], carriers: Sequence[int], crew: Crew, max_norm: float | None) -> None:
        self.strands, self._carriers, self._crew, self._max_norm = strands, carriers, crew, max_norm
        self._controls: list[StepControl | None] | None = None  # of the rounds whose average is not used yet
        self._brought = 0.0  # samples that the cluster brought to them
        self._factor = 1.0  # by which the average is scaled down

    @property
    def count(self) -> int:
        """How many strands the run has."""
        return len(self._carriers)

    @property
    def samples(self) -> float:
        """The number of samples that the cluster has accumulated."""
        return self.strands[0].gradients.samples

    @property
    def held(self) -> bool:
        """Whether rounds were begun whose average is not used yet."""
        return self._controls is not None

    def accumulate(self, batch_size: float) -> None:
        """Add the `.grad` of the pieces, the mean over `batch_size` samples of the cluster."""
        self._crew.tell("accumulate", batch_size, late=True)
        for strand in self.strands:
            strand.gradients.accumulate(batch_size)

    def reset(self) -> None:
        """Drop what was accumulated."""
        self._crew.tell("reset")
        for strand in self.strands:
            strand.gradients.reset()

    # -- into rounds

    def close(self, scale: float = 1.0) -> float:
        """Begin the rounds of all strands with what was accumulated, unless this epoch has had them.

        Returns:
            The number of samples behind what the cluster brings: none if an element is not finite at any rank.
        """
        if self.held:
            return self._brought
        samples = self.samples
        self._crew.tell("close")
        are_finite = [self.close_here(), *self._crew.hear()]
        self._crew.tell("begin", samples if all(are_finite) else 0.0)
        self.begin_here(samples if all(are_finite) else 0.0)
        return self._brought

    def close_here(self) -> bool:
        """Bring what was accumulated to the next rounds; whether all of it is finite."""
        samples = self.samples
        return min([strand.gradients.close() for strand in self.strands]) == samples

    def begin_here(self, samples: float) -> None:
        """Begin the rounds, with the weight of so many samples."""
        if not samples:
            for strand in self.strands:
                strand.gradients.reset()
        self._brought = samples
        self._controls = [
            strand.averager.step(weight=samples, wait=False) if strand.averager.is_alive() else None
            for strand in self.strands
        ]

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Wait for these rounds at all ranks. See `AveragerGradients.average`."""
        self._crew.tell("average", timeout)
        ended = over()
        try:
            mine = self.average_here(timeout, ended)
            if not self._crew.has_answered(ended):
                raise Behind("the others have ended the epoch before this cluster's gradients were there")
        except AveragingError:
            self._crew.tell("go on")  # they need not wait any more
            self._crew.hear()
            raise
        finally:
            ended.cancel()
        return self.named(mine, self._crew.hear())

    def average_here(self, timeout: float, ended: Future[None]) -> bytes:
        """Wait for the rounds of this rank's strands. If one fails, the average is the cluster's own mean.

        Returns:
            The names of the averages, one after the other.

        Raises:
            Behind: if the others have ended the epoch.
            Rejected: if they have other terms.
        """
        names = []
        for strand, control in zip(self.strands, self._controls or [None] * len(self.strands), strict=True):
            found = None if control is None else average_of(strand.averager, control, timeout, ended)
            if found is None:
                strand.gradients.use_local()
                found = blake3(b"own gradients of " + strand.averager.peer_id.key).digest()
            names.append(found)
        return b"".join(names)

    def named(self, mine: bytes, others: Sequence[bytes]) -> bytes:
        """One name for all strands, given those of each rank's, at rank 0."""
        return name_of(self._carriers, [mine, *others])

    def use_local(self) -> None:
        """Nothing to do: there was no round of the run, and the strands' results are the best there is."""

    # -- out of them

    def measure(self) -> float:
        """By which factor the average of all strands is scaled down. In rank 0, before the step."""
        if self._max_norm is None:
            return 1.0
        self._crew.tell("norms")
        squares = split(self._carriers, [self.norms_here(), *self._crew.hear()])
        norm = float(sum(squares)) ** 0.5  # in the order of the strands: alike at all peers
        return min(1.0, self._max_norm / (norm + 1e-6))

    def norms_here(self) -> list[float]:
        """The square of the norm of each strand's average."""
        found = []
        for strand in self.strands:
            *averages, _ = strand.gradients.outputs.views()
            found.append(norm_of(averages) ** 2)
        return found

    def scale_by(self, factor: float) -> None:
        """The next `as_grad` gives the average times `factor`."""
        self._factor = factor

    @contextlib.contextmanager
    def as_grad(self, targets: Sequence[torch.Tensor], max_norm: float | None = None) -> Iterator[None]:
        """Within, the `.grad` of this rank's pieces are the averages; afterwards what they were."""
        with contextlib.ExitStack() as within:
            for strand in self.strands:
                within.enter_context(strand.gradients.as_grad(strand.trained))
            if self._factor < 1.0:
                foreach_mul_([piece.grad for piece in targets if piece.grad is not None], self._factor)
            self._controls = None
            yield

    # -- life

    def enter(self, called: Callable[[], bool]) -> None:
        """From now on the others wait for this cluster's gradients. See `AveragerGradients.enter`."""
        if not all(strand.averager.is_alive() for strand in self.strands) and not called():
            self._crew.tell("enter")
            self.enter_here()
            self._crew.hear()
            if called():
                self.leave()

    def enter_here(self) -> None:
        """Be in the runs of this rank's strands."""
        for strand in self.strands:
            strand.averager.run_in_background(await_ready=False)
        for strand in self.strands:
            strand.averager.wait_until_ready()

    def leave(self) -> None:
        """Have nobody wait for this cluster's gradients: they are of a state that it leaves."""
        self._crew.tell("leave")
        self.leave_here()

    def leave_here(self) -> None:
        """Be in no strand's run any more, knowing who is."""
        for strand in self.strands:
            strand.averager.leave()  # which ends its round
        self._controls = None

    def stop(self) -> None:
        """Leave for good."""
        for strand in self.strands:
            strand.averager.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Nothing is carried from one epoch to the next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if there is something."""
        if state:
            raise ValueError("strands keep nothing")


def split(carriers: Sequence[int], by_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """What ranks say of their strands, in the order of the strands."""
    of_rank = [iter(said) for said in by_rank]
    return [next(of_rank[rank]) for rank in carriers]


def name_of(carriers: Sequence[int], by_rank: Sequence[bytes]) -> bytes:
    """The hash of the strands' 32-byte names, of which each rank has those of its own."""
    named = [[names[at : at + 32] for at in range(0, len(names), 32)] for names in by_rank]
    return blake3(b"".join(split(carriers, named))).digest()
