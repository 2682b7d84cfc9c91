"""The rounds of the strands of a cluster: before that of the run, each rank averages its own strands."""

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
        vector: what they average.
        averager: makes them.
        counted: how many tensors of the vector count for its norm, from the first on.
    """

    vector: Vector
    averager: StrandAverager
    counted: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What rounds have moved at this rank: bytes, and the seconds that they took."""

    sent: int = 0
    received: int = 0
    seconds: float = 0.0


class StrandRounds(ABC):
    """The rounds of the strands that this rank carries. At rank 0, what is done here is done at all ranks.

    The run's own round follows, in which rank 0 names the averages of all strands, as with `AveragerGradients`. Who has
    other averages than most downloads their state.

    Args:
        carriers: which rank has each strand of the run.
        crew: the other ranks.
        max_norm: to which norm the average is scaled down, over all strands.

    Attributes:
        moved: what the last rounds have moved at this rank.
    """

    def __init__(self, carriers: Sequence[int], crew: Crew, max_norm: float | None) -> None:
        self._carriers, self._crew, self._max_norm = carriers, crew, max_norm
        self._controls: list[StepControl | None] | None = None  # of the rounds whose average is not used yet
        self._in_round: Sequence[Strand] = ()
        self._brought_to_rounds = 0.0  # samples of the cluster
        self._factor = 1.0  # by which the average is scaled down
        self.moved = Moved()
        self._began: Moved | None = None  # what the node had moved by then

    @property
    @abstractmethod
    def averagers(self) -> Sequence[StrandAverager]:
        """All of this rank."""

    @property
    def count(self) -> int:
        """How many strands the run has."""
        return len(self._carriers)

    @property
    def held(self) -> bool:
        """Whether rounds were begun whose average is not used yet."""
        return self._controls is not None

    # -- into rounds

    def begin_here(self, strands: Sequence[Strand], samples: float) -> None:
        """Begin the rounds of these strands, with the weight of so many samples."""
        self._in_round, self._brought_to_rounds = strands, samples
        self._began = self._so_far()
        self._controls = [strand.averager.begin(samples) if strand.averager.is_alive() else None for strand in strands]

    def average(self, timeout: float, over: Callable[[], Future[None]]) -> bytes:
        """Wait for these rounds at all ranks. See `AveragerGradients.average`."""
        self._crew.tell("average", timeout)
        ended = over()
        try:
            mine = self.average_here(timeout, ended)
            if not self._crew.has_answered(ended):
                raise Behind("the others have ended the epoch before this cluster's gradients were there")
            others = self._crew.hear()
            if not all(others):
                raise Behind("others have averaged a strand without the rank that carries it here")
        except AveragingError:
            self._crew.tell("go on")  # they need not wait any more
            self._crew.hear()
            raise
        finally:
            ended.cancel()
        return name_of(self._carriers, [mine, *others])

    def average_here(self, timeout: float, ended: Future[None]) -> bytes:
        """Wait for the rounds of this rank's strands. If one fails, the average is the cluster's own mean.

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
        """Nothing to do: there was no round of the run, and the strands' results are the best there is."""

    def carried(self) -> dict[str, Any]:
        """Nothing is carried from one epoch to the next."""
        return {}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if there is something: then an averager carried it."""
        if state:
            raise ValueError("strands carry nothing")

    # -- out of them

    def measure(self) -> float:
        """By which factor the average of all strands is scaled down. At rank 0, before the step."""
        if self._max_norm is None:
            return 1.0
        self._crew.tell("norms")
        squares = split(self._carriers, [self.norms_here(), *self._crew.hear()])
        norm = float(sum(squares)) ** 0.5  # in the order of the strands: alike at all peers
        return float(min(1.0, self._max_norm / (norm + 1e-6)))

    def norms_here(self) -> list[float]:
        """The square of the norm of each strand's average."""
        return [norm_of(strand.vector.outputs.views()[: strand.counted]) ** 2 for strand in self._in_round]

    def scale_by(self, factor: float) -> None:
        """The next `as_grad` gives the average times `factor`."""
        self._factor = factor

    # -- life

    def enter(self, called: Callable[[], bool]) -> None:
        """From now on the others wait for this cluster. If their rounds have begun, it gets the results of these."""
        if not all(averager.is_alive() for averager in self.averagers):
            self._crew.tell("enter")
            self.enter_here()
            self._crew.hear()

    def enter_here(self) -> None:
        """Be in the runs of this rank's strands."""
        for averager in self.averagers:
            averager.run_in_background(await_ready=False)
        for averager in self.averagers:
            averager.wait_until_ready()

    def leave(self) -> None:
        """Have nobody wait for what this cluster brings: it is of a state that it leaves."""
        self._crew.tell("leave")
        self.leave_here()

    def leave_here(self) -> None:
        """Be in no strand's run any more."""
        for averager in self.averagers:
            averager.shutdown()  # which ends its round
        self._controls = None

    def stop(self) -> None:
        """Leave for good."""
        self.leave_here()


def split(carriers: Sequence[int], by_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """What ranks say of their strands, in the order of the strands."""
    of_rank = [iter(said) for said in by_rank]
    return [next(of_rank[rank]) for rank in carriers]


def name_of(carriers: Sequence[int], by_rank: Sequence[bytes]) -> bytes:
    """The hash of the strands' 32-byte names, of which each rank has those of its own."""
    named = [[names[at : at + DIGEST_BYTES] for at in range(0, len(names), DIGEST_BYTES)] for names in by_rank]
    return blake3(b"".join(split(carriers, named))).digest()
