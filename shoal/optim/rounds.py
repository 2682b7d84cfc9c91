"""In which rounds the work of the peers is averaged: in the round of the run, or in rounds before it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from shoal.averaging.control import StepControl
from shoal.averaging.engine import Engine
from shoal.averaging.exchange import Vector
from shoal.averaging.options import term_of
from shoal.interrupts import any_finished
from shoal.optim.division import name_of
from shoal.optim.grad_averager import AveragerSum, GradientAverager
from shoal.optim.result import Cost
from shoal.optim.strand_averager import StrandAverager
from shoal.optim.turns import waiting
from shoal.optim.work import Work
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected

log = logging.getLogger(__name__)


class Rounds(ABC):
    """The rounds that average what `Work` brings.

    Args:
        work: what they average.

    Attributes:
        work: as given.
        brought: the samples with which the rounds of this epoch have begun.
        cost: of the last rounds before the round of the run.
    """

    averager: GradientAverager | None = None
    """The user's averager that makes them, if one does."""
    precede = True
    """Whether they come before the round of the run, which averages no gradients then."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.brought = 0.0
        self.cost = Cost()

    # -- life

    @abstractmethod
    def enter(self, called: Callable[[], bool]) -> None:
        """Join the peers that average, before the run counts on this peer. From now on they wait for it.

        Args:
            called: whether the end of the epoch has begun.
        """

    @abstractmethod
    def leave(self) -> None:
        """Leave these peers, so that nobody waits for this one: it is about to leave the state to which its
        contribution belongs."""

    def stop(self) -> None:
        """Leave for good. If a thread waits for an average, it gets an error."""
        self.leave()

    # -- the end of an epoch

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether rounds have begun whose average is not used yet. The end of an epoch may need several tries: all of
        them use the same average, and drop what this peer accumulates after it."""

    def may_begin(self, *, is_past: bool) -> bool:
        """Whether the rounds may begin now.

        Args:
            is_past: whether others have ended the epoch.
        """
        return not is_past

    @abstractmethod
    def begin(self, epoch: int, samples: float) -> None:
        """Begin the rounds of this epoch with what `Work` has taken.

        Args:
            samples: the weight of this peer's contribution.
        """

    @abstractmethod
    def average(self, timeout: float, ended: Future[None]) -> bytes:
        """Wait for the rounds. If one fails, its average is this peer's own mean.

        Args:
            timeout: the time in seconds without any progress after which a round has failed.
            ended: a future that is done when the others have ended the epoch. Rounds before the run's know no epochs: a
                round after that would average with those of the next epoch.

        Returns:
            The names of the averages, one after the other.

        Raises:
            Behind: if the others have ended the epoch.
            Rejected: if they have other terms.
        """

    @abstractmethod
    def name(self, by_rank: Sequence[bytes]) -> bytes:
        """A name of all averages, the same for all peers with the same ones; b"" if the run's round makes them.

        Args:
            by_rank: what `average` has returned at each rank.
        """

    def vectors(self, epoch: int) -> Sequence[Vector]:
        """The vectors of `Work` that the run's own round averages."""
        return []

    @property
    def turns(self) -> Sequence[Sequence[Vector]]:
        """The vectors that the run's rounds average, in turn."""
        return []

    def settle(self, outcome: Outcome) -> None:  # noqa: B027 (the rounds before have settled theirs)
        """The run's round is over: note what its codecs have lost."""

    def use_local(self) -> None:  # noqa: B027 (the results of the rounds before stay in use)
        """There is no round of the run: use this peer's own contribution as the average."""

    @abstractmethod
    def used(self) -> None:
        """The average was used."""

    # -- what peers compare, and what is saved

    def schemas(self) -> list[bytes]:
        """The shapes and orders that must be equal in a run."""
        return []

    def terms(self) -> dict[str, str]:
        """The options that must be equal in a run, by name."""
        return {}

    def carried(self) -> dict[str, Any]:
        """What is carried from one epoch to the next; {} if it is nothing."""
        return {}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Continue from what `carried` returned; with {}, as if nothing had been averaged.

        Raises:
            ValueError: if it is the state of something else.
        """
        if state:
            raise ValueError("this optimizer has none")


class InTheRun(Rounds):
    """The round of the run averages what `Work` brings, so there is nothing to join, to wait for or to name.

    Args:
        work: see `Rounds`.
    """

    precede = held = False

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._epoch = 0

    def enter(self, called: Callable[[], bool]) -> None:
        """See `Rounds`."""

    def leave(self) -> None:
        """See `Rounds`."""

    def may_begin(self, *, is_past: bool) -> bool:
        """See `Rounds`. A peer that has missed the round of the run gets its result."""
        return True

    def begin(self, epoch: int, samples: float) -> None:
        """See `Rounds`."""
        self._epoch = epoch

    def average(self, timeout: float, ended: Future[None]) -> bytes:
        """See `Rounds`."""
        return b""

    def name(self, by_rank: Sequence[bytes]) -> bytes:
        """See `Rounds`."""
        return b""

    def vectors(self, epoch: int) -> Sequence[Vector]:
        """See `Rounds`."""
        return self.work.vectors(epoch)

    @property
    def turns(self) -> Sequence[Sequence[Vector]]:
        """See `Rounds`."""
        return self.work.all_vectors

    def schemas(self) -> list[bytes]:
        """See `Rounds`."""
        return self.work.schemas()

    def settle(self, outcome: Outcome) -> None:
        """See `Rounds`."""
        for vector in self.work.vectors(outcome.begin.tip.epoch):
            vector.settle(outcome)

    def use_local(self) -> None:
        """See `Rounds`."""
        for vector in self.work.vectors(self._epoch):
            vector.use_local()

    def used(self) -> None:
        """See `Rounds`."""


class AveragerRounds(Rounds):
    """The rounds of the averager that the user's `grad_averager_factory` has made.

    They wait for all known members. So the averager leaves its run while this peer downloads a state (`leave`), and
    joins it again afterwards (`enter`).

    Args:
        work: see `Rounds`.
        me: this peer's key.
        gradients: accumulates the gradients of the work in the averager.
    """

    def __init__(self, work: Work, me: bytes, gradients: AveragerSum) -> None:
        super().__init__(work)
        self._me, self._gradients = me, gradients
        self.averager = self._averager = gradients.averager
        self._control: StepControl | None = None  # the control of the round whose average is not used yet

    def enter(self, called: Callable[[], bool]) -> None:
        """See `Rounds`. If the end of the epoch has begun, this peer stays out, because the others may be past their
        averager's round. They would wait for this peer in the run's round, and this peer would wait for them in the
        next round of the averager."""
        if not self._averager.is_alive() and not called():
            self._averager.run_in_background()
            if called():
                self._averager.shutdown()

    def leave(self) -> None:
        """See `Rounds`."""
        self._averager.shutdown()  # which ends its round
        self._control = None

    @property
    def held(self) -> bool:
        """See `Rounds`."""
        return self._control is not None

    def begin(self, epoch: int, samples: float) -> None:
        """See `Rounds`."""
        self.brought, self._control = samples, self._gradients.begin()

    def average(self, timeout: float, ended: Future[None]) -> bytes:
        """See `Rounds`."""
        found = None if self._control is None else average_of(self._averager, self._control, timeout, ended)
        if found is None:
            self._control = None
        return found or own_name(self._me)

    def name(self, by_rank: Sequence[bytes]) -> bytes:
        """See `Rounds`."""
        return by_rank[0]

    def used(self) -> None:
        """See `Rounds`."""
        self._control = None

    def terms(self) -> dict[str, str]:
        """See `Rounds`."""
        own = ", ".join(f"{name} {value}" for name, value in sorted(self._averager.agreed_options().items()))
        return {"grad_averager_factory": term_of(f"{type(self._averager).__name__} ({own})")}

    def carried(self) -> dict[str, Any]:
        """See `Rounds`."""
        return self._averager.state_dict()

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """See `Rounds`."""
        self._averager.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Strand:
    """What a rank brings to the rounds of one strand: the vector that they average, and what makes them."""

    vector: Vector
    averager: StrandAverager


class StrandRounds(Rounds):
    """The rounds of the strands that this rank carries. The run's own round follows, in which rank 0 names the averages
    of all strands. A peer whose averages differ from those of most peers downloads their state.

    Args:
        work: see `Rounds`.
        turns: the strands of this rank, for each turn in which they are averaged.
        carriers: for each strand of the run, the rank of this cluster that carries it.
        schema: which parameters of the model are averaged together, as bytes that peers compare.
    """

    def __init__(
        self, work: Work, turns: Sequence[Sequence[Strand]], carriers: Sequence[int], schema: bytes = b""
    ) -> None:
        super().__init__(work)
        self._schema = schema
        self._turns, self._carriers = turns, carriers
        self._averagers = [strand.averager for turn in turns for strand in turn]
        self._has_entered = False  # whether all of them are in their runs
        self._controls: list[StepControl | None] | None = None  # of rounds whose average is not used yet
        self._in_round: Sequence[Strand] = ()
        self._began = Cost()  # the node's counters when the rounds began

    def enter(self, called: Callable[[], bool]) -> None:
        """See `Rounds`. If the others' rounds have begun, this rank gets their results."""
        if self._has_entered:
            return
        for averager in self._averagers:
            averager.enter()
        for averager in self._averagers:
            averager.engine.wait_until_ready()
        self._has_entered = True

    def leave(self) -> None:
        """See `Rounds`."""
        self._has_entered = False
        for averager in self._averagers:
            averager.leave()  # which ends its round
        self._controls = None

    @property
    def held(self) -> bool:
        """See `Rounds`."""
        return self._controls is not None

    def begin(self, epoch: int, samples: float) -> None:
        """See `Rounds`."""
        strands = self._turns[epoch % len(self._turns)]
        self._in_round, self.brought, self._began = strands, samples, self._so_far()
        averagers = [strand.averager for strand in strands]
        try:
            self._controls = [averager.begin(samples) if averager.engine.is_alive() else None for averager in averagers]
        except BaseException:  # Ctrl-C, too: the next try begins all of them
            self.leave()
            raise

    def average(self, timeout: float, ended: Future[None]) -> bytes:
        """See `Rounds`."""
        names = []
        for strand, control in zip(self._in_round, self._controls or [None] * len(self._in_round), strict=True):
            found = None if control is None else average_of(strand.averager.engine, control, timeout, ended)
            if found is None:
                strand.vector.use_local()
                found = own_name(strand.averager.dht.peer_id.key)
            names.append(found)
        now, then = self._so_far(), self._began
        self.cost = Cost(now.sent - then.sent, now.received - then.received, now.seconds - then.seconds)
        return b"".join(names)

    def _so_far(self) -> Cost:
        node = self._averagers[0].dht.node
        return Cost(node.bytes_sent, node.bytes_received, time.monotonic())

    def name(self, by_rank: Sequence[bytes]) -> bytes:
        """See `Rounds`."""
        return name_of(self._carriers, by_rank)

    def used(self) -> None:
        """See `Rounds`."""
        self._controls = None

    def terms(self) -> dict[str, str]:
        """See `Rounds`."""
        # Terms are compared in the order of their names. A peer with another number of strands should hear that first.
        return {"strands": str(len(self._carriers))}

    def schemas(self) -> list[bytes]:
        """See `Rounds`."""
        return [self._schema] if self._schema else []


def own_name(key: bytes) -> bytes:
    """The name of the own mean of the peer with this key, which it uses if there was no round."""
    return blake3(b"own gradients of " + key).digest()


def average_of(
    averager: GradientAverager | Engine, control: StepControl, timeout: float, ended: Future[None]
) -> bytes | None:
    """Wait for a round of gradients, which precedes the round of the run. If it fails, log a warning.

    Args:
        timeout: the time in seconds without any progress after which the round has failed.
        ended: a future that is done when the others have ended the epoch.

    Returns:
        The digest of the average, which names it; None if the round failed.

    Raises:
        Behind: if the others have ended the epoch.
        Rejected: if they have other terms.
    """
    try:
        either: list[Future[Any]] = [control, ended]
        until = time.monotonic() + timeout
        with waiting():
            while time.monotonic() < until and not any_finished(either, until - time.monotonic()):
                until = max(until, averager.got_on_at + timeout)
        if not control.done() and ended.done() and not ended.cancelled():
            control.cancel()
            raise Behind("the others have ended the epoch before this peer's gradients were there")
        control.result(0.0)
    except (Rejected, Behind):
        raise
    except (AveragingError, TimeoutError, CancelledError) as error:
        control.cancel()
        log.warning("the gradients were not averaged (%s): going on with this peer's own", error)
        return None
    assert averager.last_round is not None
    return bytes.fromhex(averager.last_round.digest)
