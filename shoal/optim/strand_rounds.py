"""The rounds of the strands of a cluster. Before the round of the run, each rank averages its own strands."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from shoal.averaging.control import StepControl
from shoal.averaging.exchange import Vector
from shoal.interrupts import Interrupted
from shoal.optim.crew import Crew
from shoal.optim.exact_norm import norm_of
from shoal.optim.grad_averager import average_of
from shoal.optim.strand_averager import StrandAverager
from shoal.swarm.protocol.errors import AveragingError, Behind
from shoal.swarm.protocol.tip import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Strand:
    """What a rank brings to the rounds of one strand.

    Attributes:
        vector: the vector that the rounds average.
        averager: makes the rounds.
        counted: the norm covers the first `counted` tensors of the vector.
    """

    vector: Vector
    averager: StrandAverager
    counted: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The cost of rounds at this rank: the bytes sent and received, and the seconds."""

    sent: int = 0
    received: int = 0
    seconds: float = 0.0


class StrandRounds(ABC):
    """The rounds of the strands that this rank carries. A call at rank 0 makes all ranks do the same. The methods whose
    names end in `_here` concern only this rank.

    The run's own round follows. In it, rank 0 names the averages of all strands, as with `AveragerGradients`. A peer
    whose averages differ from those of most peers downloads their state.

    Args:
        carriers: for each strand of the run, the rank of this cluster that carries it.
        crew: tells the other ranks what to do.
        max_norm: scale the average down to this norm over all strands; no limit when None.

    Attributes:
        moved: the cost of the last rounds at this rank.
    """

    def __init__(self, carriers: Sequence[int], crew: Crew, max_norm: float | None) -> None:
        self._carriers, self._crew, self._max_norm = carriers, crew, max_norm
        self._controls: list[StepControl | None] | None = None  # controls of rounds whose average is not used yet
        self._in_round: Sequence[Strand] = ()
        self._brought_to_rounds = 0.0  # samples of the cluster
        self._factor = 1.0  # the factor that scales the average down
        self._norm: float | None = None  # of the average; at rank 0, if it is clipped
        self.moved = Moved()
        self._began: Moved | None = None  # the node's counters when the rounds began

    @property
    @abstractmethod
    def averagers(self) -> Sequence[StrandAverager]:
        """All averagers of this rank."""

    @property
    def count(self) -> int:
        """The number of strands of the run."""
        return len(self._carriers)

    @property
    def held(self) -> bool:
        """Whether rounds have begun whose average is not used yet."""
        return self._controls is not None

    # -- into rounds

    def begin_here(self, strands: Sequence[Strand], samples: float) -> None:
        """Begin the rounds of these strands, with `samples` as the weight."""
        self._in_round, self._brought_to_rounds = strands, samples
        self._began = self._so_far()
        self._controls = [strand.averager.begin(samples) if strand.averager.is_alive() else None for strand in strands]

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Wait for the rounds at all ranks, see `AveragerGradients.average`."""
        self._crew.tell("average", timeout)
        ended = over()
        try:
            mine = self.average_here(timeout, ended)
            if not self._crew.has_answered(ended):
                raise Behind("the others have ended the epoch before this cluster's gradients were there")
            others = self._crew.hear()
            if not all(others):
                raise Behind("others have averaged a strand without the rank that carries it here")
        except (AveragingError, Interrupted):
            self._crew.tell("go on")  # the other ranks need not wait any more
            self._crew.hear()
            raise
        finally:
            ended.cancel()
        return name_of(self._carriers, [mine, *others])

    def average_here(self, timeout: float, ended: Future[None]) -> bytes:
        """Wait for the rounds of this rank's strands. If one fails, its average is the cluster's own mean.

        Args:
            timeout: the time in seconds without any progress after which a round has failed.
            ended: a future that is done when the others have ended the epoch.

        Returns:
            The names of the averages, one after the other.

        Raises:
            Behind: if the others have ended the epoch.
            Rejected: if they have other terms.
        """
        names = []
        for strand, control in zip(self._in_round, self._controls or [None] * len(self._in_round), strict=True):
            found = None if control is None else average_of(strand.averager, control, timeout, ended)
            if found is None:
                strand.vector.use_local()
                found = blake3(b"own gradients of " + strand.averager.peer_id.key).digest()
            names.append(found)
        if self._began is not None:
            now, then = self._so_far(), self._began
            self.moved = Moved(now.sent - then.sent, now.received - then.received, now.seconds - then.seconds)
            self._began = None
        return b"".join(names)

    def _so_far(self) -> Moved:
        node = self.averagers[0].dht.node
        return Moved(node.bytes_sent, node.bytes_received, time.monotonic())

    def use_local(self) -> None:  # noqa: B027 (nothing to do for anyone)
        """Nothing to do: there was no round of the run, and the results of the strands stay in use."""

    def carried(self) -> dict[str, Any]:
        """Nothing is carried from one epoch to the next."""
        return {}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Load nothing: strands carry nothing.

        Raises:
            ValueError: if `state` is not empty, because then it is the state of an averager.
        """
        if state:
            raise ValueError("strands carry nothing")

    # -- out of rounds

    def measure(self) -> float:
        """The factor that scales the average of all strands down to `max_norm`. Called at rank 0, before the step, of
        which it notes the norm."""
        self._norm = None
        if self._max_norm is None:
            return 1.0
        self._crew.tell("norms")
        squares = split(self._carriers, [self.norms_here(), *self._crew.hear()])
        self._norm = float(sum(squares)) ** 0.5  # in the order of the strands, so that all peers get the same bits
        return float(min(1.0, self._max_norm / (self._norm + 1e-6)))

    def norms_here(self) -> list[float]:
        """The square of the norm of each strand's average."""
        return [norm_of(strand.vector.outputs.views()[: strand.counted]) ** 2 for strand in self._in_round]

    def scale_by(self, factor: float) -> None:
        """Make the next `as_grad` multiply the average by `factor`."""
        self._factor = factor

    # -- life

    def enter(self, called: Callable[[], bool]) -> None:
        """Join the runs of the strands at all ranks. From now on the others wait for this cluster. If their rounds have
        begun, this cluster gets the results."""
        if not all(averager.is_alive() for averager in self.averagers):
            self._crew.tell("enter")
            self.enter_here()
            self._crew.hear()

    def enter_here(self) -> None:
        """Join the runs of this rank's strands."""
        for averager in self.averagers:
            averager.run_in_background(await_ready=False)
        for averager in self.averagers:
            averager.wait_until_ready()

    def leave(self) -> None:
        """Leave the runs of the strands at all ranks, so that nobody waits for this cluster: it is about to leave the
        state to which its contribution belongs."""
        self._crew.tell("leave")
        self.leave_here()

    def leave_here(self) -> None:
        """Leave the runs of this rank's strands."""
        for averager in self.averagers:
            averager.shutdown()  # which ends its round
        self._controls = None

    def stop(self) -> None:
        """Leave for good; at this rank only."""
        self.leave_here()


def split(carriers: Sequence[int], by_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """Sort values that each rank has given for its own strands into the order of all strands."""
    of_rank = [iter(said) for said in by_rank]
    return [next(of_rank[rank]) for rank in carriers]


def name_of(carriers: Sequence[int], by_rank: Sequence[bytes]) -> bytes:
    """The hash of all strands' 32-byte names. Each rank gives the names of its own strands, one after the other."""
    named = [[names[at : at + DIGEST_BYTES] for at in range(0, len(names), DIGEST_BYTES)] for names in by_rank]
    return blake3(b"".join(split(carriers, named))).digest()
